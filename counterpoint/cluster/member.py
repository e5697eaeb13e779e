"""A worker as the others see it: its name, incarnation, stage, and where it takes calls."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    """The stage of a worker."""

    INIT = "INIT"
    READY = "READY"
    RUNNING = "RUNNING"
    FINISH = "FINISH"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class Member:
    """A worker of the job, as the others see it."""

    worker: str
    """The name of the worker."""
    incarnation: int
    """0: not created yet."""
    stage: Stage
    address: str = ""
    """The address at which it takes calls; empty while it does not."""
    node: str = ""
    """The node on which it runs."""
    server_key: str = ""
    """The CURVE public key of its address, Z85; empty on loopback."""
