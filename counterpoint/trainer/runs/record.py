"""The record of one run id: its stage, its directory and configuration, its orchestrator, and its `Run` while it has a slot.

Pure data. `counterpoint/trainer/runs/registry.py` has the records of all runs, and the only functions that change their stages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal

from counterpoint.run.trained import TrainedRun
from counterpoint.trainer.runs.control_files import RunDirectory
from counterpoint.transport.messages import Hello

if TYPE_CHECKING:
    from counterpoint.trainer.runs.run import Run  # which imports torch: status and page read records, too


class RunStage(Enum):
    """The stage of a run at the trainer."""

    SEEN = "seen"
    """The orchestrator has connected, or the directory is there; no configuration has been checked."""
    REFUSED = "refused"
    """The configuration cannot be trained; it is checked again when the file changes."""
    EVICTED = "evicted"
    """`control/evicted.txt` is there, and the run has no slot."""
    WAITING = "waiting"
    """The run may be trained, and has no slot."""
    ADMITTED = "admitted"
    """The run has a slot; its adapter and optimizer are being made, and its first weights published."""
    TRAINING = "training"
    """The run has a slot, and its batches are taken."""
    FINISHED = "finished"
    """The run has a slot, and all its steps are trained."""
    LEAVING = "leaving"
    """The run has a slot, which it loses at the next discovery; no batch is taken."""
    DELETED = "deleted"
    """The directory was deleted after the run had got a slot, and there is none of that name."""


WITHOUT_SLOT = frozenset({RunStage.SEEN, RunStage.REFUSED, RunStage.EVICTED, RunStage.WAITING, RunStage.DELETED})
TAKES_BATCHES = frozenset({RunStage.TRAINING, RunStage.FINISHED})

TRANSITIONS: dict[RunStage, frozenset[RunStage]] = {
    **dict.fromkeys(WITHOUT_SLOT, WITHOUT_SLOT),
    RunStage.WAITING: WITHOUT_SLOT | {RunStage.ADMITTED},
    RunStage.ADMITTED: TAKES_BATCHES | {RunStage.LEAVING},
    RunStage.TRAINING: TAKES_BATCHES | {RunStage.LEAVING},
    RunStage.FINISHED: frozenset({RunStage.FINISHED, RunStage.LEAVING}),
    RunStage.LEAVING: WITHOUT_SLOT | {RunStage.LEAVING},
}
"""The stages that may follow each stage. Without a slot, a run is in the stage that its directory stands for."""


@dataclass(slots=True)
class Orchestrator:
    """Whether the orchestrator of a run is connected, and the last answer to it. Times are of one monotonic clock, in seconds."""

    connected: bool = False
    """Whether its orchestrator is connected: from `HELLO` to `BYE`."""
    hello: Hello | None = None
    """The last `HELLO`."""
    confirmed: bool = False
    """Whether a message of a session has come since then."""
    unreachable_since: float = math.inf
    patience: float = math.inf
    """Seconds for which an orchestrator that cannot be reached still counts as present."""
    bye_deadline: float = math.inf
    """The time at which the trainer stops waiting for the `BYE` of an orchestrator whose run is trained to its end."""
    unanswered_since: float | None = None
    """The time since when the orchestrator of a run without a slot awaits an answer."""
    last_answer: tuple[str, float] | None = None
    """The last answer to the orchestrator of a waiting run, and its time."""

    def is_present(self, now: float) -> bool:
        """Returns whether the orchestrator is connected and has not been unreachable for longer than `patience`."""
        return self.connected and now - self.unreachable_since <= self.patience


@dataclass(slots=True)
class RunRecord:
    """What the trainer knows of a run id, with and without a slot. What lasts as long as the slot is in `run`."""

    run_id: str
    stage: RunStage = RunStage.SEEN
    found: RunDirectory | None = None
    """The directory, as of the last discovery."""
    directory: int | None = None
    """Inode of the directory that was seen last; None once that was deleted."""
    checked: RunDirectory | None = None
    """The directory as it was when its configuration was checked."""
    config: TrainedRun | None = None
    """The configuration, if it was accepted."""
    refusal: str | None = None
    """Why the configuration was refused, if it was."""
    eviction: str | None = None
    """The reason in `control/evicted.txt`, if the file exists."""
    had_slot: bool = False
    """Whether its batches have ever been taken: the trainer's end depends on such runs alone."""
    ended: Literal[RunStage.EVICTED, RunStage.DELETED] | None = None
    """How the run ended after it had a slot; None before, and again after another admission."""
    orchestrator: Orchestrator = field(default_factory=Orchestrator)
    run: Run | None = None
    """The run, from the admission to a slot until it leaves that."""

    @property
    def admissible(self) -> bool:
        """Whether the run may have a slot."""
        return self.config is not None and self.eviction is None

    @property
    def reason(self) -> str | None:
        """Why the run may not have a slot; None if nothing is against it."""
        return self.eviction or self.refusal
