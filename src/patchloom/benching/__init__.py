"""Speed and memory of the networks, beside those of their peers."""
