"""Weights as files: loading, saving, published layouts, resizing, deltas and the hub. Imports models; knows no task."""
