"""C++ operators for the CPU: how they are compiled (`build`, `libraries`), how Python calls them (`calls`, `packing`,
`checks`), and the torch operators made of them (`native` registers all of torch.ops.patchloom).

Imports errors and nothing else of the package; layers, models, data, benching and exporting may import it.
"""
