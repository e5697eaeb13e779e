"""What page, API and command line do to a job and its runs: plain functions, a verb or a family of them in each file.

Each takes the job's directory, a run's id where it concerns one, and plain values; it returns a small record and raises
`UserError`, whose subclasses in `ask.py` say what kind of error it is. Nothing here holds state of its own: requests go as files
to the process that carries them out (`counterpoint/run/requests.py`), each exactly once by its id. `docs/serve.md` is for people.
"""
