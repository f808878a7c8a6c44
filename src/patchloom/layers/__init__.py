"""Building blocks of the networks: the residual, attention, mixing, stems, FFN, norms, scales and their initialisation.
Imports kernels only."""
