"""Building blocks of the networks: the residual, attention, mixing, stems, FFN, norms, scales and their initialisation.

Every layer works on tokens (B, N, D) or maps (B, height, width, D). This package imports only `kernels`; `models` and
everything above it may import it."""
