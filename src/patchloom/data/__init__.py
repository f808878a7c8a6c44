"""Images and their targets: sources and splits, decoding, transforms, the order of batches, the loader, checks of data
and sample photos. Imports models for preprocessing only; knows no task."""
