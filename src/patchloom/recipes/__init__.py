"""Training recipes of the papers as typed values with their sources, one file per paper, and changes to them.

This package imports `data`, `models` and what is below them; `training` and everything above it may import it.
Nothing here trains.
"""
