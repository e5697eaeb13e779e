"""Environments in processes of their own: `workers = N` in an environment's configuration.

The orchestrator has a proxy (`proxy.py`) over a pool of workers (`pool.py`, `process.py`, `watcher.py`), which it hears by one
ZMQ socket (`wire.py`, `protocol.py`). Each worker (`worker.py`) loads the environment and plays rollouts on a loop of its own,
with a model that asks the orchestrator (`remote_model.py`). `docs/environments.md` says what is promised.
"""
