"""Context parallelism: the ranks of a group compute one packed row together, each its own stretch of the tokens.

For samples whose activations do not fit one rank. Inside `shared_rows` every forward pass of the model is a group's: each rank
gives `log_probabilities` the whole row, computes its stretch of it, and gets the values of the whole row. Every layer but
attention works on each token by itself. In attention a rank gathers the keys and values of the whole row, and its queries see
what comes before them in their sample (`counterpoint/trainer/model/attention.py`). So a loss over whole samples is computed on
every rank as on one. A rank differentiates what its stretch contributes, and the gradients of all ranks are added at the end of
the step, as those of different rows are.

Source: gathering keys and values, Llama Team, "The Llama 3 Herd of Models", 2024, section 3.3.2. Stretches are contiguous, so the
last rank's queries see the most keys. Shape suffixes as in `transport/records.py`, `t` for the tokens of a stretch, `p` for its
predictions, `D` for a head's size, `R` for ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from counterpoint.trainer.model.exchange import Collective


class ContextGroup:
    """The ranks that compute a row together. No dataclass: FSDP looks for tensors in all of those that a model is given."""

    def __init__(
        self, group: dist.ProcessGroup, index: int, size: int, commands: dist.ProcessGroup | None = None
    ) -> None:
        """Takes the group of `size` ranks, this rank's place among them, and the same ranks for tensors on the CPU."""
        self.group = group
        self.index = index
        self.size = size
        self.commands = commands
        self.made: list[Collective] = []
        """Receives every call of a pass; `counterpoint/trainer/model/passes.py` empties it."""
        self.stretch: Stretch | None = None
        """The stretch of the pass in progress, if the pass is one of `counterpoint/trainer/model/passes.py`."""


@contextmanager
def shared_rows(model: nn.Module, group: ContextGroup | None) -> Iterator[None]:
    """Computes rows on the ranks of `group` together, in forward passes inside; on this rank alone without a group."""
    before: Any = getattr(model, "context_group", None)
    model.context_group = group
    try:
        yield
    finally:
        model.context_group = before


def stretch_of(model: nn.Module, tokens: int) -> Stretch | None:
    """Returns this rank's stretch of a row of `tokens`; None outside `shared_rows`."""
    group: Any = getattr(model, "context_group", None)
    return None if group is None else Stretch(group, tokens)


@dataclass(frozen=True, slots=True)
class Stretch:
    """This rank's part of a row. All parts have the same length: the row is followed by tokens that mean nothing."""

    context: ContextGroup
    tokens: int
    """The tokens of the row."""

    @property
    def length(self) -> int:
        """Tokens of each stretch."""
        return -(-self.tokens // self.context.size)

    @property
    def padding(self) -> int:
        """Tokens after the row."""
        return self.length * self.context.size - self.tokens

    @property
    def start(self) -> int:
        """The first token of the part."""
        return self.context.index * self.length

    @property
    def stop(self) -> int:
        """The token after its last."""
        return self.start + self.length

    def take(self, values_T: Tensor) -> Tensor:
        """Returns its part of `[T, ...]`; zeros after the row."""
        own = values_T[self.start : self.stop]
        return functional.pad(own, (0, 0) * (own.ndim - 1) + (0, self.length - len(own)))

    def sample_lengths(self, lengths: Sequence[int]) -> list[int]:
        """Returns the lengths of the row's samples, and of what follows the row."""
        return [*lengths, self.padding] if self.padding else list(lengths)

    def spans(self, spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Returns the part of `(slot, tokens)`, end to end, that is in this stretch; what follows the row is of the last slot."""
        *others, (last, tokens) = spans
        own, first = [], 0
        for slot, count in [*others, (last, tokens + self.padding)]:
            inside = min(first + count, self.stop) - max(first, self.start)
            if inside > 0:
                own.append((slot, inside))
            first += count
        return own

    def predictions(self, predicting_P: Tensor) -> tuple[Tensor, list[int]]:
        """Returns which predictions of the row, by ascending position, this rank computes, and how many each rank computes."""
        rank_P = predicting_P // self.length
        counts: list[int] = torch.bincount(rank_P, minlength=self.context.size).tolist()
        return (rank_P == self.context.index).nonzero()[:, 0], counts

    def whole(self, states_1HtD: Tensor) -> Tensor:
        """Gathers keys or values `[1, heads, t, D]` to those of the row; a gradient by them is added over the ranks."""
        gathered: Tensor = _GatherStates.apply(states_1HtD, self.context)
        return gathered

    def gather(self, own_p: Tensor, counts: list[int]) -> Tensor:
        """Returns the values of all predictions, `[P]`; `own_p` have a gradient, and those of other ranks have it there."""
        values_P: Tensor = _GatherValues.apply(own_p, counts, self)
        return values_P


class _GatherStates(torch.autograd.Function):
    """Every rank has a gradient by the keys and values of the whole row, from its own queries."""

    @staticmethod
    def forward(ctx: Any, own_1HtD: Tensor, context: ContextGroup) -> Tensor:
        ctx.context = context
        return _gather(own_1HtD[0], context).transpose(0, 1).flatten(1, 2)[None]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_1HTD: Tensor) -> tuple[Any, ...]:
        parts_HRtD = gradient_1HTD[0].unflatten(1, (ctx.context.size, -1))
        return _scatter(parts_HRtD.transpose(0, 1), ctx.context)[None], None


class _GatherValues(torch.autograd.Function):
    """Every rank computes the same loss from the gathered values, so a gradient by its own is a slice of it, locally."""

    @staticmethod
    def forward(ctx: Any, own_p: Tensor, counts: list[int], stretch: Stretch) -> Tensor:
        index, padded_t = stretch.context.index, functional.pad(own_p, (0, stretch.length - len(own_p)))
        parts_Rt = _gather(padded_t[None, :, None], stretch.context)[:, 0, :, 0]
        start = sum(counts[:index])
        ctx.own = slice(start, start + len(own_p))
        return torch.cat([part[:count] for part, count in zip(parts_Rt, counts, strict=True)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_P: Tensor) -> tuple[Any, ...]:
        return gradient_P[ctx.own], None, None


@dataclass(frozen=True, slots=True)
class StretchCall:
    """A collective call over the stretches of a row, of any values."""

    context: ContextGroup
    gathers: bool
    heads: int
    size: int
    dtype: torch.dtype
    device: torch.device

    def play(self) -> None:
        """Makes the call with zeros, as many as the stretches of the pass in progress take."""
        assert self.context.stretch is not None
        shape = (self.context.size, self.heads, self.context.stretch.length, self.size)
        zeros_RHtD = torch.zeros(shape, dtype=self.dtype, device=self.device)
        if self.gathers:
            _gather(zeros_RHtD[0], self.context)
        else:
            _scatter(zeros_RHtD, self.context)


def _gather(own_HtD: Tensor, context: ContextGroup) -> Tensor:
    """Returns what each rank has of the row, `[R, H, t, D]`."""
    heads, _, size = own_HtD.shape
    context.made.append(StretchCall(context, True, heads, size, own_HtD.dtype, own_HtD.device))
    whole_RHtD = own_HtD.new_empty(context.size, *own_HtD.shape)
    dist.all_gather_single(whole_RHtD.view(-1), own_HtD.contiguous().view(-1), group=context.group)
    return whole_RHtD


def _scatter(parts_RHtD: Tensor, context: ContextGroup) -> Tensor:
    """Returns the sum over the ranks of what they have for this rank's stretch, `[H, t, D]`."""
    _, heads, _, size = parts_RHtD.shape
    context.made.append(StretchCall(context, False, heads, size, parts_RHtD.dtype, parts_RHtD.device))
    own_HtD = parts_RHtD.new_empty(parts_RHtD.shape[1:])
    dist.reduce_scatter_single(own_HtD.view(-1), parts_RHtD.contiguous().view(-1), group=context.group)
    return own_HtD
