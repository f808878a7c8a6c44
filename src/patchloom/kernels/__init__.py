"""C++ operators for inference on a CPU, how they are compiled, and the same operators in torch for every other device.
Imports nothing of the package but errors."""
