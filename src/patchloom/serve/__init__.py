"""The HTTP service and its web page: `patchloom serve`."""
