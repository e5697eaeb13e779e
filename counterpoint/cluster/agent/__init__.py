"""The agent of a node: the process that owns the worker processes, and survives the master."""
