"""Runs: the config of a run, launching and resuming it, sequences of runs, plans and lists of runs. It reaches a task
through the registry in `patchloom.tasks` only."""
