"""Weights as files: loading, saving, published layouts, resizing, deltas and the Hugging Face hub.

This package imports `models` and what is below it, and knows nothing about tasks; `data` and everything above it may
import it.
"""
