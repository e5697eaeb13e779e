"""Episodes of several runs: one run's environment hosts them (`table.Table`), others take seats in them (the kind `seat`).

Each run is an orchestrator of its own, so that each trains its own turns, by its own policy. `wire` is what they say to each
other over a UNIX socket in the job's directory, and `matching` decides which seat goes to which episode.
"""
