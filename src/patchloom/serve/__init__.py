"""The HTTP service behind `patchloom serve`: routes, uploads, batching, limits, metrics, search and the web page.

This package imports `inference`, `explaining`, `search` and what is below them; only `cli` may import it.
"""
