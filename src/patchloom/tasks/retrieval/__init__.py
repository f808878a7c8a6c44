"""Grafit (thesis chapter 2): embeddings for fine-grained search, learned from coarse labels or none.

The kNN loss over a memory of all training images, the instance loss against a slowly following network, and the
baselines of the chapter."""
