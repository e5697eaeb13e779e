"""The small messages of the wire, all but the batch itself (see `records.Batch`). See `docs/contracts.md`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from counterpoint.transport.records import Batch, Float32Array

PROTOCOL_VERSION = 6
"""2: a sample's row of a batch's header has its temperature, a READY opens a session, and a COMMIT lets a batch be trained.
3: a HELLO says what cannot be sent again, and which process of the run it is; a READY names the newest batch.
4: a PUBLISHED says which weights are there.
5: every message names its run, so that one connection serves many.
6: an ITEM asks something of a driven run, and an ANSWERED says what came of it."""

NO_LIMIT = 2**62
MAX_REASON_LENGTH = 2**10

Text = Annotated[str, Meta(max_length=MAX_REASON_LENGTH)]
Count = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Hello:
    """Tells the trainer that a run connects, or connects anew."""

    run_id: Text
    durable: Count
    """The last step whose batch this orchestrator cannot send again, since a trainer has reported it durable; 0 for none."""
    epoch: Count = 0
    """A number that grows each time a process takes the run over; 0: none of them does."""
    holder: Text = ""
    """The process that proposes the epoch: no two are alike."""
    protocol: Count = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Ready:
    """Tells the orchestrator that the trainer knows the run, and opens a session.

    Messages of earlier sessions do not count any more.
    """

    next_step: Count
    """The first step the trainer lacks."""
    credit: Count
    """How many unacknowledged batches the trainer will hold."""
    session: Count
    """A random number that names the session: no two are alike, even of different trainers."""
    credit_bytes: Count = NO_LIMIT
    """How many bytes the arrays of those batches may take together. One alone may take more."""
    max_batch_bytes: Count = NO_LIMIT
    """The trainer's own limit for one batch."""
    batch: Text = ""
    """The digest (`transport/codec.py`:`digest_of`) of the batch of step `next_step - 1`; empty if it is not known."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Brings the trainer a batch, which is trained once a `Commit` of the same session covers its step."""

    batch: Batch
    session: Count


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks for an item of a driven run, which is carried out once all before it are. It needs no commit."""

    number: Count
    """Items count from 1."""
    header: bytes
    """What is asked for (`counterpoint/run/items.py`)."""
    batch: Batch | None = None
    """The samples of its contribution."""
    session: Count = 0


@dataclass(frozen=True, slots=True)
class Commit:
    """Tells the trainer that the batches of the session up to `step` are committed, also those that arrive later."""

    step: Count
    session: Count


@dataclass(frozen=True, slots=True)
class Waiting:
    """Tells the orchestrator why the run cannot be trained yet, every few seconds, so that silence means a loss."""

    reason: Text


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Tells the orchestrator that the batches up to `step` have arrived; a checkpoint covers those up to `durable`."""

    step: Count
    durable: Count


SECONDS = "accelerator_seconds"
"""The metric of every answer of an item that was carried out: seconds of all ranks, of shared rows by tokens."""


@dataclass(frozen=True, slots=True)
class Answered:
    """Tells a driven run what came of an item."""

    number: Count
    step: Count
    """The run's newest update."""
    fault: Literal["", "asker", "trainer"] = ""
    """Whether it failed, by what was asked for or by the trainer; the reason is `text` then."""
    text: Text = ""
    """The directory of a publication."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    columns: Mapping[str, Float32Array] = field(default_factory=dict)
    """The results of a contribution, `[T]` each."""


@dataclass(frozen=True, slots=True)
class Published:
    """Tells the orchestrator that policy version `version` is published. On NFS the list of its directory may be old."""

    version: Count


@dataclass(frozen=True, slots=True)
class Rejected:
    """Tells the orchestrator why its message was dropped. `step` and `session` are None when the message named none.

    Another version reads it, too: its fields stay as they are, as `Hello` keeps `protocol`.
    """

    step: Count | None
    reason: Text
    session: Count | None = None


@dataclass(frozen=True, slots=True)
class HelloRefused(Rejected):
    """A `Rejected` that answers a `Hello`, as the link finds: the trainer is of another version."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """Tells the orchestrator that the trainer accepts nothing more from this run."""

    reason: Text


@dataclass(frozen=True, slots=True)
class Bye:
    """Tells either peer that the other disconnects on purpose."""

    reason: Text = ""


ToOrchestrator = Ready | Waiting | Acknowledged | Answered | Published | Rejected | Evicted | Bye
