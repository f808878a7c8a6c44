"""The HTTP service and its web page, `patchloom serve`: requests, batching, limits and the API page. Imports inference
and explaining."""
