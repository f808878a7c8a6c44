"""Kinds of learning, one folder each: the task of the loop, its options, metrics, report sections and prediction.
Outside its folder a task is known only to the registry of this package."""
