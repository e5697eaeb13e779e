"""What an agent is to do: the answers of its decisions.

`counterpoint/cluster/agent/table.py` decides, and `counterpoint/cluster/agent/agent.py` carries out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from counterpoint.cluster.agent.order import WorkerOrder


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start the worker's process; `spawned` or `spawn_failed` follows."""

    order: WorkerOrder


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the worker's process of a class."""

    worker: str
    message: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask the worker's process to end: SIGTERM for a command, a message for a class."""

    worker: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill the worker's process and everything below it."""

    worker: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Send a message to the peer that asked."""

    message: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message to the master."""

    message: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Send a message to a master that was replaced."""

    peer: Any
    message: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finish:
    """Has the agent end."""

    reason: str


Instruction = Spawn | Send | Terminate | Kill | Answer | Tell | Dismiss | Finish
