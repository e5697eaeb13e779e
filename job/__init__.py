"""Floor 3: one file to one job: its configuration, its directory, its runs' state, sweeps of jobs, and replays of dumped
steps."""
