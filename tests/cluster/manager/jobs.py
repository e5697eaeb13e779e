"""The jobs that several tests use."""

from __future__ import annotations

from typing import Any

from counterpoint.cluster.manager.events import Outcome
from counterpoint.cluster.manager.state import FENCE_LEASES, KILL_GRACE_SECONDS
from tests.cluster.manager.driver import Driver, command

KILLED_SECONDS = KILL_GRACE_SECONDS + FENCE_LEASES * 10.0
"""How long the end of a killed worker may take, with the lease that these jobs have."""


def three(**options: Any) -> Driver:
    """Two services, and the task that needs the second; each a command, as in `counterpoint run`."""
    return Driver(
        command("server", **options),
        command("trainer", **options),
        command("task", task=True, after=("trainer",), **options),
    )


def in_a_row(**options: Any) -> Driver:
    """The same, but the second service needs the first one."""
    return Driver(
        command("server", **options),
        command("trainer", after=("server",), **options),
        command("task", task=True, after=("trainer",), **options),
    )


def sweep(*names: str, **options: Any) -> Driver:
    """A service, and several tasks that do not know one another; all of them run."""
    tasks = [command(name, task=True, after=("trainer",), **options) for name in names]
    return Driver(command("trainer", max_restarts=3), *tasks).running()


def failed(code: int, worker: str, words: str) -> Outcome:
    """The outcome of a job that failed since a worker did."""
    return Outcome(code, f"{worker} {words} (log: logs/{worker}.log)", worker)
