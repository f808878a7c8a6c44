"""The HTTP service behind `patchloom serve`: routes, uploads, batching, limits, metrics and the web page.

This package imports `inference`, `explaining` and what is below them; only `cli` may import it.
"""
