"""Context parallelism: the ranks of a group compute one packed row together, each its own stretch of the tokens.

For samples whose activations do not fit one rank. Inside `shared_rows` every forward pass of the model is a group's: each rank
gives `log_probabilities` the whole row, computes its stretch of it, and gets the values of the whole row. Every layer but
attention works on each token by itself. In attention a rank gathers the keys and values of the whole row, and its queries see
what comes before them in their sample (`trainer/model/attention.py`). So a loss over whole samples is computed on every rank as
on one. A rank differentiates what its stretch contributes, and the gradients of all ranks are added at the end of the step, as
those of different rows are.

Source: gathering keys and values, Llama Team, "The Llama 3 Herd of Models", 2024, section 3.3.2. Stretches are contiguous, so the
last rank's queries see the most keys. Shape suffixes as in `transport/records.py`, `t` for the tokens of a stretch, `p` for its
predictions, `D` for a head's size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The ranks that compute a row together."""

    group: dist.ProcessGroup
    index: int
    """This rank's place among them."""
    size: int


@contextmanager
def shared_rows(model: nn.Module, group: ContextGroup | None) -> Iterator[None]:
    """Computes rows on the ranks of `group` together, in forward passes inside; on this rank alone without a group."""
    model.context_group = group
    try:
        yield
    finally:
        model.context_group = None


def stretch_of(model: nn.Module, tokens: int) -> Stretch | None:
    """Returns this rank's stretch of a row of `tokens`; None outside `shared_rows`."""
    group: Any = getattr(model, "context_group", None)
    return None if group is None else Stretch(group, tokens)


@dataclass(frozen=True, slots=True)
class Stretch:
    """This rank's part of a row. All parts have the same length: the row is followed by tokens that mean nothing."""

    context: ContextGroup
    tokens: int
    """Of the row."""

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
        """Its first token."""
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
        gathered: Tensor = collectives.all_gather_single(states_1HtD.contiguous(), 2, self.context.group)
        return gathered

    def gather(self, own_p: Tensor, counts: list[int]) -> Tensor:
        """Returns the values of all predictions, `[P]`; `own_p` have a gradient, and those of other ranks have it there."""
        values_P: Tensor = _GatherValues.apply(own_p, counts, self.context)
        return values_P


class _GatherValues(torch.autograd.Function):
    """Every rank computes the same loss from the gathered values, so a gradient by its own is a slice of it, locally."""

    @staticmethod
    def forward(ctx: Any, own_p: Tensor, counts: list[int], context: ContextGroup) -> Tensor:
        padded = own_p.new_zeros(max(counts))
        padded[: len(own_p)] = own_p
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=context.group)
        start = sum(counts[: context.index])
        ctx.own = slice(start, start + len(own_p))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_P: Tensor) -> tuple[Any, ...]:
        return gradient_P[ctx.own], None, None
