"""The loop and what it owns: optimizer, schedules, averaging, precision, processes, checkpoints, the run folder and its
log. It trains any task that keeps the contract, and knows none."""
