"""The record of one run: its stage, its directory and configuration, its orchestrator's presence, and what its slot holds.

Pure data. `trainer/runs/registry.py` has the records of all runs, and the only functions that change their stages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Literal

from run.config import RunConfig
from trainer.runs.control_files import Sighting
from transport.messages import Hello
from transport.records import Batch


class Stage(Enum):
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


WITHOUT_SLOT = frozenset({Stage.SEEN, Stage.REFUSED, Stage.EVICTED, Stage.WAITING, Stage.DELETED})
TAKES_BATCHES = frozenset({Stage.TRAINING, Stage.FINISHED})

TRANSITIONS: dict[Stage, frozenset[Stage]] = {
    **dict.fromkeys(WITHOUT_SLOT, WITHOUT_SLOT),
    Stage.WAITING: WITHOUT_SLOT | {Stage.ADMITTED},
    Stage.ADMITTED: TAKES_BATCHES | {Stage.LEAVING},
    Stage.TRAINING: TAKES_BATCHES | {Stage.LEAVING},
    Stage.FINISHED: frozenset({Stage.FINISHED, Stage.LEAVING}),
    Stage.LEAVING: WITHOUT_SLOT | {Stage.LEAVING},
}
"""The stages that may follow each stage. Without a slot, a run is in the stage that its directory stands for."""


@dataclass(slots=True)
class Progress:
    """How far a run has been trained."""

    step: int = 0
    """The last step trained, which is the policy version of the weights."""
    total_tokens: int = 0
    total_samples: int = 0
    schedule_offset: int = 0
    """Added to a step's number for its position in the learning-rate schedule; not 0 after a copy that took that over."""
    batch: str = ""
    """The digest of the batch of `step`; empty where it is not known."""


@dataclass(slots=True)
class Occupancy:
    """What a slot holds of its run, from the admission until the run leaves. Nothing of it outlives that."""

    slot: int
    """The run's position among the trainer's `max_runs`."""
    run_id: str
    number: int
    """The number of the admission: two admissions of one run differ."""
    config: RunConfig
    """With which the run is trained."""
    admitted_with: RunConfig | None = None
    """The same as its file has it: a discovered hook may have set another scaling factor; on rank 0."""
    directory: int = 0
    """Inode of the run's directory at the admission; on rank 0."""
    descriptor: int | None = None
    """Open file descriptor of that directory: while it is open, no other directory gets the inode; on rank 0."""
    progress: Progress = field(default_factory=Progress)
    """Set by rank 0's discovered hooks to the step from which the run continues; all ranks then have it."""
    beginning: Path | None = None
    """The directory of the adapter with which the run begins, if it has no checkpoint; rank 0 decides it for all ranks."""
    created: bool = False
    """Whether the creation hooks have been called on this rank."""
    failure: str | None = None
    """Why the run could not be made on the ranks."""
    durable_step: int = 0
    """Acknowledged as durable: the batches up to this step will not be needed again."""
    session: int | None = None
    """The number sent with the last READY."""
    committed: int = 0
    """The last step that the orchestrator has reported as committed."""
    refusals: int = 0
    """Batches rejected because they were beyond the run's credit."""
    holder: str = ""
    """The process of the orchestrator of which `waiting` and `committed` are."""
    waiting: dict[int, Batch] = field(default_factory=dict)
    """Batches received and not yet trained, by step."""
    open_step: int | None = None
    """The step in progress: its batch is no longer in `waiting`, and not yet trained."""
    batch: str = ""
    """The digest of the batch of the open step, or of the one opened last."""
    waited: float = 0.0
    """Seconds for which the batch of the open step was awaited."""
    idle_since: float = 0.0
    """When the last step ended, or the run became ready."""

    @property
    def finished(self) -> bool:
        """Whether all its steps have been trained."""
        return self.progress.step >= self.config.steps


@dataclass(slots=True)
class Presence:
    """Whether a run's orchestrator is connected, and the last answer to it. Times are of one monotonic clock, in seconds."""

    connected: bool = False
    """From `HELLO` to `BYE`."""
    hello: Hello | None = None
    """The last one."""
    confirmed: bool = False
    """Whether a message of a session has come since then."""
    unreachable_since: float = math.inf
    patience: float = math.inf
    """Seconds for which an orchestrator that cannot be reached still counts as present."""
    bye_deadline: float = math.inf
    """When the trainer stops waiting for the `BYE` of an orchestrator whose run is trained to its end."""
    unanswered_since: float | None = None
    """Since when the orchestrator of a run without a slot awaits an answer."""
    last_answer: tuple[str, float] | None = None
    """The last answer to the orchestrator of a waiting run, and its time."""

    def is_present(self, now: float) -> bool:
        """Returns whether the orchestrator is connected and has not been unreachable for longer than `patience`."""
        return self.connected and now - self.unreachable_since <= self.patience


@dataclass(slots=True)
class RunRecord:
    """All that the trainer keeps of one run, except torch's state, which the learner has."""

    run_id: str
    stage: Stage = Stage.SEEN
    sighting: Sighting | None = None
    """The directory, as of the last discovery."""
    directory: int | None = None
    """Inode of the directory that was seen last; None once that was deleted."""
    checked: Sighting | None = None
    """The sighting whose configuration was checked."""
    config: RunConfig | None = None
    """The configuration, if it was accepted."""
    refusal: str | None = None
    """Why the configuration was refused, if it was."""
    eviction: str | None = None
    """The reason in `control/evicted.txt`, if the file exists."""
    had_slot: bool = False
    """Whether its batches have ever been taken: the trainer's end depends on such runs alone."""
    ended: Literal[Stage.EVICTED, Stage.DELETED] | None = None
    """How the run ended after it had a slot; None before, and again after another admission."""
    presence: Presence = field(default_factory=Presence)
    occupancy: Occupancy | None = None

    @property
    def admissible(self) -> bool:
        """Whether the run may have a slot."""
        return self.config is not None and self.eviction is None

    @property
    def reason(self) -> str | None:
        """Why the run may not have a slot; None if nothing is against it."""
        return self.eviction or self.refusal
