"""The small messages of the wire, all but the batch itself (see `records.Batch`). The contract is in `docs/contracts.md`."""

from __future__ import annotations

from dataclasses import dataclass

PROTOCOL_VERSION = 2
"""2: a sample's row of a batch's header has its temperature."""


@dataclass(frozen=True, slots=True)
class Hello:
    """To the trainer: a run (re)connects."""

    run_id: str
    last_acknowledged: int
    """The last step whose ACK this orchestrator has seen; 0 for none."""
    protocol: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Ready:
    """To the orchestrator: the trainer knows the run."""

    next_step: int
    """The first step the trainer lacks."""
    credit: int
    """How many unacknowledged batches the trainer will hold."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """To the orchestrator: the run cannot be trained yet, and why. Said again every few seconds, so that silence means a loss."""

    reason: str


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """To the orchestrator: the batch of `step` has arrived; `durable` is the last step a checkpoint covers."""

    step: int
    durable: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """To the orchestrator: a message of its was dropped, and why. `step` is None when the message named none."""

    step: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Evicted:
    """To the orchestrator: the trainer takes nothing more from this run."""

    reason: str


@dataclass(frozen=True, slots=True)
class Bye:
    """Both ways: this peer leaves on purpose."""

    reason: str = ""


ToTrainer = Hello | Bye
ToOrchestrator = Ready | Waiting | Acknowledged | Rejected | Evicted | Bye
