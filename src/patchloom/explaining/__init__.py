"""Explanations of predictions: attention maps, saliency, faithfulness scores, and analyses of whole networks.

This package imports `tasks` and what is below it; `serve` and `cli` may import it.
"""
