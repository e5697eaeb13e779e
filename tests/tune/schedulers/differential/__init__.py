"""The same random streams of events into Ray Tune's schedulers and into ours: the decisions must be the same.

    python -m tests.tune.schedulers.differential --streams 10000

`scenario.py` draws a stream's settings, `world.py` plays it against one side, `ours.py` and `rays.py` are the sides, and
`reference.py` holds each deliberate difference as a correction of Ray's class. Imports Ray, so it runs in a process of its own.
"""
