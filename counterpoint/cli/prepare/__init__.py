"""Commands that prepare a job: its model, its keys, and the files with which other schedulers run it."""
