"""What a trained network is used for, whatever it was trained for: embeddings, neighbours, probes, branch norms and
prediction over many images. Imports data, models, weights and training, but no task."""
