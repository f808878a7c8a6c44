"""What a trained network of any task is used for: embeddings, neighbours, probes, branch norms and
prediction over many images. Imports data, models, weights and training, but no task."""
