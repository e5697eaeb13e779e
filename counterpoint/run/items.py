"""What is asked of a run in the trainer under one number, and what comes of it: the part beside arrays, typed and bounded.

An item travels as `transport/messages.py`:`Ask`, with the batch of its contribution; its result as `Answered`. The trainer's own
`Item` (`counterpoint/trainer/work/sources.py`) has the same content.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from counterpoint.transport.typed import typed
from counterpoint.transport.unpacked import unpacked

MAX_ITEM_BYTES = 2**31
"""Longest header of an item: weights and targets of a contribution's tokens are in it, 8 bytes a token."""

Name = Annotated[str, Meta(max_length=64)]

RESULTS = ("log_probabilities", "losses")
"""Columns that a contribution may return: of each trained token its log-probability before the update, and its loss with its
weight; 0 where no token is trained."""


class AdamW(msgspec.Struct, frozen=True, tag="adamw"):
    """The values of one update by AdamW."""

    rate: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    decay: float = 0.0
    """Decoupled weight decay of matrices."""
    clip: float = 1.0
    """The global norm to which the gradients are clipped; infinite: not at all."""


class Sgd(msgspec.Struct, frozen=True, tag="sgd"):
    """The values of one update by SGD."""

    rate: float
    momentum: float = 0.0
    decay: float = 0.0
    """Weight decay of matrices, which is added to their gradients."""
    clip: float = 1.0
    """The global norm to which the gradients are clipped; infinite: not at all."""


UpdateValues = AdamW | Sgd


class Given(msgspec.Struct, frozen=True):
    """A column of numbers that a loss reads: for each token a value, or as many as the column has for every token."""

    data: bytes
    """`[T]`, or `[T, K]` for any K above 0."""
    dtype: Literal["float32", "int64"] = "float32"


class Objective(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What samples are trained for, where it is not what the run's configuration says."""

    loss: dict[str, Any] | None = None
    """The keys of `[training.loss]`; None: the run's loss."""
    divisor: float | None = None
    """What the sum of the tokens' losses is divided by; None: as the loss's normalisation says."""
    weights: bytes = b""
    """float32 `[T]`: by which the loss of each token is multiplied; empty: 1."""
    targets: bytes = b""
    """int32 `[T]`: what is predicted in the place of each token; empty: the token itself."""
    inputs: dict[Name, Given] = {}
    """What the loss reads beside the batch's columns, by name."""
    returns: bool = False
    """Whether results for each token are wanted: `RESULTS`."""
    forward_only: bool = False
    """Whether nothing but results is wanted: the samples have no gradient, and are no part of an update."""
    graph: bytes = b""
    """A loss that a client has traced (`counterpoint/run/loss_graph.py`), computed in place of that of `loss`; empty: none."""


class ItemHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An item without its batch. What it asks for happens in this order, after the contribution."""

    objective: Objective | None = None
    spoils: bool = False
    """Whether it stands for a contribution that its asker has refused: the next update fails, and drops what was contributed."""
    updates: bool = False
    values: UpdateValues | None = None
    """The values of the update; None: those of the configured schedule."""
    publication: Name | None = None
    """The name under which the weights are published then."""
    saves: Literal["", "newest", "kept"] = ""
    """Whether the state is saved: as the newest checkpoint, or to be kept beyond newer ones."""


def encode_item(header: ItemHeader) -> bytes:
    """Returns an item as msgpack."""
    return msgspec.msgpack.encode(header)


def decode_item(data: bytes | memoryview) -> ItemHeader:
    """Returns what `encode_item` made. Raises `ValueError` for anything else, before it allocates more than a multiple of it."""
    if len(data) > MAX_ITEM_BYTES:
        raise ValueError(f"an item of {len(data)} bytes; at most {MAX_ITEM_BYTES}")
    return typed(unpacked(data, "an item", ValueError), ItemHeader, "item", ValueError)
