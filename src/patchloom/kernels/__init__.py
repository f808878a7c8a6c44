"""Operators of our own for inference on a CPU, and the same in torch for every other place."""
