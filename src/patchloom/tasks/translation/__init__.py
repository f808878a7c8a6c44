"""Translation of text: data and vocabulary, batches by tokens, training, decoding, metrics and report. Below
`api`, only the registry in `patchloom.tasks` imports this folder."""
