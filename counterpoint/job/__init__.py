"""One file to one job: configuration, directory, supervision and state, sweeps of runs, and replays of dumps."""
