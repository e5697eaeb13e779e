"""Commands that prepare a job: its keys, and the files with which other schedulers run it."""
