"""Kinds of learning, one folder each: the task of the loop, its options, metrics, report sections and prediction.
`training`, `data`, `inference`, `runs` and `cli` reach a task through the registry of this package only; `api`,
`recipes` and `explaining` may name one."""
