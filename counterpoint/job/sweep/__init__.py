"""A sweep of runs or jobs: its file, its targets, and what a worker does with one."""
