"""What the state machine knows of one trial beyond what everybody reads in `Trial`: its attempt, and what is to be done next."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.result import Result


class AttemptPhase(StrEnum):
    """The place of an attempt at the executor."""

    OUT = "out"
    """The executor has no attempt of the trial."""
    STARTING = "starting"
    RESTING = "resting"
    """It waits for what follows; only while one event is handled."""
    TRAINING = "training"
    """It works towards a result."""
    SAVING = "saving"
    RESETTING = "resetting"
    WAITING = "waiting"
    """It rests until the checkpoint that it is to take over is durable."""
    STOPPING = "stopping"


class Exploit(NamedTuple):
    """A trial's next life: another's checkpoint and a new configuration."""

    source: Checkpoint
    config: dict[str, Any]
    experiment_tag: str


class HeldResult(NamedTuple):
    """A result that arrived while its trial was being paused, saved or reset."""

    result: Result
    stop: bool


@dataclass(slots=True)
class TrialProgress:
    """The progress of one trial."""

    index: int
    """Its place in the order of creation."""
    needs: str
    """The resources of a trial, as `needs_of` writes them."""
    attempt: int = 0
    phase: AttemptPhase = AttemptPhase.OUT
    counted: int | float = 0
    """The `training_iteration` of the newest result that counted; an earlier one is a repetition after a restore."""
    lacks_metric: bool = False
    """Whether a result lacked a metric on which someone must decide."""
    latest: Result = field(default_factory=dict)
    """The newest result of this attempt, be it a repetition, since it became a copy if it did; empty before. What a checkpoint
    that is made now holds."""
    repeats: bool = False
    """Whether it was said that an attempt has reported an iteration twice."""
    saves: int = 0
    """How many checkpoints were asked for; each has a directory of its own, also when it failed."""
    wanted: Checkpoint | None = None
    """Whether it is to be saved as soon as the trial rests, or being saved."""
    wanted_kept: bool = False
    """Whether the user wants it (`checkpoint_freq`, `checkpoint_at_end`), and not only the scheduler or a pause."""
    end: str | None = None
    """The status that follows as soon as the trial rests and is saved."""
    exploit: Exploit | None = None
    held: list[HeldResult] = field(default_factory=list)
    """Delivered, in order, as soon as the trial rests and goes on."""
    returned: bool = False
    """Whether the attempt's trainable has returned; acted on after what is held."""
    for_scheduler: Checkpoint | None = None
    """The last that the scheduler asked for. It stays while the scheduler may still name it as a source."""
