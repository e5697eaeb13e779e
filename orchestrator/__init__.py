"""Floor 2: the daemon: one process, one uvloop loop, from examples to batches."""
