"""Speed and memory of the networks, measured beside those of other libraries in one run. Imports tasks and below."""
