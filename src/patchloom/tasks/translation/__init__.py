"""Translation of text: data and vocabulary, batches by tokens, loss, decoding and metrics. Imported by runs and cli."""
