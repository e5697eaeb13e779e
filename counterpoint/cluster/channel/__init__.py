"""Channels: named, bounded queues between the roles of a job, with leases, redelivery and an end of stream.

`self_loop.py` has `DataChannel` and the worker that runs its own loop between two of them. `queue.py` decides, `host.py` executes
and `journal.py` stores; `producer.py` and `consumer.py` are the two ends, and `messages.py` what these ask the host.
`docs/cluster.md` says what is promised, and why a record is committed exactly once.
"""
