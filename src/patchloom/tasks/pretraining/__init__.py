"""Self-supervised pre-training: features learned from images without labels (DINO, BeiT, MAE).

One task for all methods. A method is an object (`method.py`) that brings its modules, views and losses."""
