"""Sends the tokens of a layer to the ranks that own their experts, and brings the results back.

Each rank of a group owns as many experts of every layer, in their order. The pairs of token and expert are sorted by expert and
go to the owners, which compute them and send the results back; the rank that has the token adds them up by the gate's weights.
All ranks of the group make the same calls in the same order, also those without a token, or with none for their experts: first
how many pairs go where, then the hidden states, then the results, and in the backward pass both ways again with gradients. A
layer that is computed again (`counterpoint/trainer/model/recompute.py`) keeps its route. Source: Lepikhin et al., "GShard", 2020,
section 3.2.

Shape suffixes as in `transport/records.py`, `N` for this rank's `T * K` pairs of token and expert, `M` for the pairs that arrive
and one more, `R` for ranks, `G` for the groups of rows that a rank computes: of each of its experts and each kind of token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from counterpoint.trainer.model.without_waiting import counts_of

Compute = Callable[[Tensor, Tensor], Tensor]
"""Maps the rows `[M, H]` of this rank's experts, sorted by group, and how many each group has, int64 `[G]`, to `[M, H]`."""


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """The ranks that divide the experts, and this rank's place among them."""

    group: dist.ProcessGroup
    peers: dist.ProcessGroup
    """The ranks, one of each group, that own the same experts as this one."""
    index: int
    size: int
    copies: int
    """Groups, and so ranks of `peers`."""
    mesh: DeviceMesh
    """Both, as the dimensions `peers` and `experts`."""


class Collective(Protocol):
    """One collective call that this rank has made or is to make."""

    def play(self) -> None:
        """Makes the call without anything to say."""


@dataclass(frozen=True, slots=True)
class Route:
    """The way of the pairs of one layer in one pass."""

    order_N: Tensor
    """int64: the pairs, by expert and kind."""
    sent: list[int]
    """Pairs that go to each rank."""
    received: list[int]
    """Pairs that come from each rank."""
    received_RG: Tensor
    """int64: the same by group of rows."""


class Exchange:
    """The exchange of one layer on this rank."""

    def __init__(self, group: ExpertGroup, experts: int) -> None:
        """Prepares for so many `experts` of all ranks, which the group's size divides."""
        self.ranks = group
        self.experts = experts
        self.own = slice(group.index * experts // group.size, (group.index + 1) * experts // group.size)
        """Experts of this rank."""
        self.made: list[Collective] = []
        """Receives every call of this layer; `counterpoint/trainer/model/passes.py` empties it."""
        self.route: Route | None = None
        """The route of the last pass."""
        self.kept: Route | None = None
        """The route to take again; None: find one."""

    def over_ranks(
        self,
        compute: Compute,
        hidden_TH: Tensor,
        expert_TK: Tensor,
        weight_TK: Tensor,
        kind_T: Tensor | None = None,
        kinds: int = 1,
    ) -> Tensor:
        """Returns the weighted sum of each token's experts, `[T, H]`; every rank of the group calls it.

        Args:
            compute: computes the rows of this rank's experts.
            hidden_TH: what the experts get.
            expert_TK: integers: the experts of each token.
            weight_TK: their weights.
            kind_T: int64, below `kinds`: tokens of a kind are computed alike. None: all are of kind 0.
            kinds: the same on all ranks.
        """
        route = self.kept or self._find(expert_TK, kind_T, kinds)
        self.route = route
        arrived_MH = _Transfer.apply(hidden_TH[route.order_N // expert_TK.shape[-1]], self, route, True)
        counts_G = route.received_RG.sum(0)
        groups = torch.arange(len(counts_G), device=counts_G.device)
        extra = len(counts_G) - kinds  # of the last expert
        group_M = torch.cat(
            [groups.repeat(self.ranks.size).repeat_interleave(route.received_RG.flatten()), groups[extra : extra + 1]]
        )
        counts_G[extra] += 1
        order_M = group_M.argsort(stable=True)
        result_MH = compute(arrived_MH[order_M], counts_G)[_inverse(order_M)]
        returned_NH = _Transfer.apply(result_MH, self, route, False)
        weighted_NH = returned_NH * weight_TK.flatten()[route.order_N, None]
        # Restored to the row's order and summed in a fixed order, as in `counterpoint/trainer/lora/experts.py`.
        return weighted_NH[_inverse(route.order_N)].view(*expert_TK.shape, -1).sum(1).to(hidden_TH.dtype)

    def _find(self, expert_TK: Tensor, kind_T: Tensor | None, kinds: int) -> Route:
        group_TK = expert_TK * kinds if kind_T is None else expert_TK * kinds + kind_T[:, None]
        group_N = group_TK.flatten()
        counts_RG = counts_of(group_N, self.experts * kinds).view(self.ranks.size, -1)
        return self.announce(group_N.argsort(stable=True), counts_RG)

    def announce(self, order_N: Tensor, counts_RG: Tensor) -> Route:
        """Tells each rank how many pairs it gets from this one, int64 `[R, G]`; returns the route of the pass."""
        received_RG = torch.empty_like(counts_RG)
        self.made.append(_Announcement(self, counts_RG.shape, counts_RG.device))
        dist.all_to_all_single(received_RG, counts_RG, group=self.ranks.group)
        sent, received = torch.stack([counts_RG.sum(1), received_RG.sum(1)]).tolist()
        self.route = Route(order_N, sent, received, received_RG)
        return self.route

    def transfer(self, rows: Tensor, route: Route, forth: bool) -> Tensor:
        """Sends rows to the owners of the experts (`[N, H]` to `[M, H]`), or back (`[M, H]` to `[N, H]`).

        The last of the `M` rows is made up, of zeros, so that products of a rank without arrivals have a row; it does not travel.
        """
        width = rows.shape[1]
        there = rows.new_empty(sum(route.received) + 1, width) if forth else rows.contiguous()
        here = rows.contiguous() if forth else rows.new_empty(sum(route.sent), width)
        self.made.append(_Transferred(self, forth, width, rows.dtype, rows.device))
        if forth:
            dist.all_to_all_single(there[:-1], here, route.received, route.sent, group=self.ranks.group)
            there[-1] = 0
            return there
        dist.all_to_all_single(here, there[:-1], route.sent, route.received, group=self.ranks.group)
        return here


class _Transfer(torch.autograd.Function):
    """A transfer, whose gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange, route: Route, forth: bool) -> Tensor:
        ctx.exchange, ctx.route, ctx.forth = exchange, route, forth
        return exchange.transfer(rows, route, forth)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.exchange.transfer(gradient, ctx.route, not ctx.forth), None, None, None


@dataclass(frozen=True, slots=True)
class _Announcement:
    exchange: Exchange
    shape: torch.Size
    device: torch.device

    def play(self) -> None:
        """Says that nothing comes from here; what comes here is still received."""
        nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        self.exchange.announce(nothing, torch.zeros(self.shape, dtype=torch.int64, device=self.device))


@dataclass(frozen=True, slots=True)
class _Transferred:
    exchange: Exchange
    forth: bool
    width: int
    dtype: torch.dtype
    device: torch.device

    def play(self) -> None:
        """Sends zeros by the route of the pass."""
        route = self.exchange.route
        assert route is not None
        rows = sum(route.sent) if self.forth else sum(route.received) + 1
        zeros = torch.zeros(rows, self.width, dtype=self.dtype, device=self.device)
        self.exchange.transfer(zeros, route, self.forth)


def _inverse(order_N: Tensor) -> Tensor:
    return torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))


def exchange_of(module: nn.Module) -> Exchange | None:
    """Returns the exchange of a layer's experts; None if `module` is none, or has all its experts."""
    found: Any = getattr(module, "exchange", None)
    return found if isinstance(found, Exchange) else None


def exchanges(module: nn.Module) -> list[Exchange]:
    """Returns the exchanges of a model or a layer, in its order."""
    return [found for each in module.modules() if (found := exchange_of(each)) is not None]


def routes_of(module: nn.Module) -> dict[Exchange, Route | None]:
    """Returns the routes of the last pass through a layer."""
    return {exchange: exchange.route for exchange in exchanges(module)}


@contextmanager
def rerouted(routes: Mapping[Exchange, Route | None]) -> Iterator[None]:
    """Takes the routes of an earlier pass inside."""
    for exchange, route in routes.items():
        exchange.kept = route
    try:
        yield
    finally:
        for exchange in routes:
            exchange.kept = None


def own_weight(weight: Any) -> Tensor:
    """Returns this rank's part of a weight that may be divided, with its gradient."""
    local: Tensor = weight.to_local() if isinstance(weight, DTensor) else weight
    return local
