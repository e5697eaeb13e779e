"""What a keeper is told of a worker that it is to start, and what it tells of one that lives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """All that a keeper needs to start one worker's process."""

    worker: str
    incarnation: int
    bundle: str
    command: tuple[str, ...]
    """The interpreter with `-m counterpoint.cluster.worker_process`, where the worker is of a class."""
    environment: Mapping[str, str]
    """Added to the keeper's. May hold secrets: it is neither journalled nor logged."""
    log_file: str
    nice: int = 0
    notifies: bool = True
    """Whether readiness and heartbeats come by systemd's protocol or the control socket; else it is ready once started."""
    silence_timeout_seconds: float | None = None
    stop_timeout_seconds: float = 30.0
    description: Mapping[str, Any] = field(default_factory=dict)
    """What becomes, for a worker of a class, its `Context` (JSON values), and its import path. Empty for a command."""


@dataclass(frozen=True, slots=True)
class LivingWorker:
    """A worker's process that a keeper has, as a new master finds it."""

    worker: str
    incarnation: int
    node: str
    pid: int
    ready: bool
    started: bool
    address: str = ""
    server_key: str = ""
    bundle: str = ""
