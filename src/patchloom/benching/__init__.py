"""Measurement of speed and memory, beside other libraries in the same run.

This package imports `tasks` and what is below it; `cli` and the scripts in benchmarks/ may import it.
"""
