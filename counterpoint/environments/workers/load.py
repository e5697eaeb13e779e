"""Loads an environment where its configuration says: in this process, or to play in workers."""

from __future__ import annotations

from counterpoint.environments.base import Environment
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.registry import load_here
from counterpoint.environments.workers.found import check_in_process
from counterpoint.environments.workers.proxy import WorkerEnvironment


def load_environment(config: EnvironmentConfig) -> Environment:
    """The environment that `config` describes, constructed and checked; with `workers`, one that plays in these.

    Raises `ValueError` that names the environment, the value at fault, and what would do instead. With workers it is loaded by a
    process of its own, so that nothing of it is in this one; that takes a moment, so call it in a thread.
    """
    return load_here(config) if config.workers == 0 else WorkerEnvironment(config, check_in_process(config))
