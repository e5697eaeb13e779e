"""What rank 0 tells all ranks to do: typed commands, as msgpack, each of which every rank carries out by the same function.

`counterpoint/trainer/learner.py: Learner.carry_out` is that function. Rank 0 shares a command and carries it out itself, so that
collective calls inside meet. The bytes of samples are sent beside a command, to the ranks that train them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from counterpoint.run.items import Objective, UpdateValues
from counterpoint.trainer.broadcast import Assembled
from counterpoint.trainer.fair_share import Row
from counterpoint.trainer.metrics import MetricValue
from counterpoint.trainer.runs.copies import Copy
from counterpoint.trainer.work.contribution import Contribution, StepOutcome
from counterpoint.transport.typed import met

Result = TypeVar("Result")


class Command(msgspec.Struct, Generic[Result], frozen=True, tag_field="kind"):
    """A command, with what it returns on rank 0."""


class Synchronize(Command[None], frozen=True):
    """Take over the slots of rank 0's manager."""


class Begin(Command[Contribution], frozen=True):
    """Open the step of a batch."""

    slot: int
    number: int
    header: dict[str, Any]
    """The header of `counterpoint/trainer/work/batch_parts.py: outline`, as the arrays are; both are empty with one rank."""
    arrays: bytes
    objective: Objective


class Conclude(Command[StepOutcome], frozen=True):
    """Add up what a contribution has come to, whose gradients wait for an update."""

    slot: int


class Train(Command[None], frozen=True):
    """Train one micro-batch on each rank."""

    rows: Sequence[Row]
    parts: list[list[tuple[int, list[int], list[int]]]]
    """The samples, for each rank and by slot, that are sent to it, and the sizes of their frames."""


class EndPass(Command[None], frozen=True):
    """End the current pass of a step, after which another one follows."""

    slot: int
    values: UpdateValues


class Finish(Command[dict[str, MetricValue]], frozen=True):
    """End the last pass of a step by its update."""

    slot: int
    values: UpdateValues


class PutCopy(Command[Copy], frozen=True):
    """Put the copy that was accepted for a step in place of its update."""

    slot: int
    step: int


class Assemble(Command[Assembled], frozen=True):
    """Put together what a broadcast needs of all ranks."""

    slot: int


class Drop(Command[None], frozen=True):
    """Drop the open step of a run, if it has one."""

    slot: int


class BeginSlices(Command[None], frozen=True):
    """Copy the own slice of a checkpoint, and begin to write it."""

    slot: int


class AskForSlices(Command[list[int]], frozen=True):
    """Agree which ranks still write their slices."""

    run_id: str


class Wait(Command[None], frozen=True):
    """Do nothing: it ends the wait for a command before that is too long."""


class Stop(Command[None], frozen=True):
    """Has the ranks end."""


AnyCommand = (
    Synchronize
    | Begin
    | Train
    | Conclude
    | EndPass
    | Finish
    | PutCopy
    | Assemble
    | Drop
    | BeginSlices
    | AskForSlices
    | Wait
    | Stop
)

encode = msgspec.msgpack.Encoder().encode

_DECODER: msgspec.msgpack.Decoder[AnyCommand] = msgspec.msgpack.Decoder(met(AnyCommand))


def decode(data: bytes) -> AnyCommand:
    """Returns the command in `data`. Raises `msgspec.ValidationError`."""
    return _DECODER.decode(data)
