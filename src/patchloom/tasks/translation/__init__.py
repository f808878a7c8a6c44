"""Translation of text: data and vocabulary, batches by tokens, training, decoding, metrics and report. Only the
registry in `patchloom.tasks` knows this folder."""
