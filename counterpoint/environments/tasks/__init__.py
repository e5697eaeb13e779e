"""Built-in tasks, small enough for a CPU."""
