"""A job as its files show it: its runs' metrics, state, logs and rollouts. Read only."""
