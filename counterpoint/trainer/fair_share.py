"""Decides whose samples are trained next: deficit round-robin over the runs' open steps, by tokens, with weights. Pure.

Source: Shreedhar and Varghese, "Efficient Fair Queuing Using Deficit Round-Robin", IEEE/ACM Transactions on Networking 4(3),
1996. A lap credits every run with its quantum, and a run is served while its credit lasts. So between two runs that always have
work, the tokens served, divided by the weights, never differ by more than a quantum and two of the longest samples. Here packets
are samples, and the link is a row of tokens on each rank. Runs of one share, such as the models of one key, divide among them the
quantum of one run: who opens more runs gets no more rows. Within a lap a run may be served before another whose next sample
does not fit into the rest of the rows, but no lap begins before the last run has been served.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

Row = list[tuple[int, list[int]]]
"""`(slot, samples)` by ascending slot: one micro-batch of one rank."""


@dataclass(slots=True)
class _Flow:
    """A run's open step. Its samples ascend by length, so that bisection finds the longest that fits."""

    weight: float
    share: str | None
    """Whose share it is part of; None: its own."""
    credit: float | None = None
    """Tokens for which the run may still be served in this lap; None until the first row after its step was opened."""
    lengths: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)

    def longest(self, room: int) -> int | None:
        """Returns where in `lengths` the longest sample of at most `room` tokens is; None where none fits."""
        position = bisect_left(self.lengths, room + 1) - 1
        return position if position >= 0 else None


class FairShare:
    """Plans the rows of all ranks.

    Within a run the longest samples come first, each to the rank with the most room: within 4/3 of the best balance (Graham,
    1969), and on one rank first fit decreasing.
    """

    def __init__(self, max_tokens: int, ranks: int) -> None:
        """Plans rows of at most `max_tokens` tokens for each of `ranks` ranks."""
        self._max_tokens = max_tokens
        self._ranks = ranks
        self._flows: dict[int, _Flow] = {}
        """The flows by slot, in the order of the round."""

    def add(self, slot: int, weight: float, lengths: Mapping[int, int], share: str | None = None) -> None:
        """Opens a step; `lengths`: sample to tokens, at most `max_tokens`. A run whose last step just ended keeps its credit.

        All runs of a `share` weigh as much together as the heaviest of them does alone.
        """
        flow = self._flows.get(slot)
        if flow is None:
            flow = self._flows[slot] = _Flow(weight, share)
        assert not flow.samples, f"slot {slot} has an open step"
        for sample, length in sorted(lengths.items(), key=lambda item: (item[1], -item[0])):
            assert 0 < length <= self._max_tokens, f"sample {sample} of slot {slot} has {length} tokens"
            flow.samples.append(sample)
            flow.lengths.append(length)

    def remove(self, slot: int) -> None:
        """Removes a run and its open step, if there is one."""
        self._flows.pop(slot, None)

    def left(self, slot: int) -> int:
        """Returns how many samples of a run's open step no row has taken yet."""
        flow = self._flows.get(slot)
        return len(flow.samples) if flow is not None else 0

    def rows(self) -> list[Row]:
        """Takes the next row of each rank; a row is empty where too few samples are left."""
        self._flows = {slot: flow for slot, flow in self._flows.items() if flow.samples}
        if new := [slot for slot, flow in self._flows.items() if flow.credit is None]:
            quanta = self._quanta()  # once: a thousand runs may open their steps together
            for slot in new:
                self._flows[slot].credit = quanta[slot]
        room = [self._max_tokens] * self._ranks
        taken: list[dict[int, list[int]]] = [{} for _ in room]
        while any(flow.samples for flow in self._flows.values()):
            # A run that has credit left but no room comes first in the next rows.
            crowded_out = [slot for slot, flow in self._flows.items() if self._serve(slot, flow, room, taken)]
            if crowded_out:
                self._begin_with(crowded_out[0])
                break
            self._credit_all()
        return [sorted(row.items()) for row in taken]

    def _serve(self, slot: int, flow: _Flow, room: list[int], taken: list[dict[int, list[int]]]) -> bool:
        """Serves a run while its credit and the room last. Returns whether the room ran out."""
        assert flow.credit is not None
        while flow.samples:
            rank = room.index(max(room))
            position = flow.longest(room[rank])
            if position is None:
                return flow.lengths[0] <= flow.credit
            if flow.lengths[position] > flow.credit:
                return False
            length = flow.lengths.pop(position)
            taken[rank].setdefault(slot, []).append(flow.samples.pop(position))
            flow.credit -= length
            room[rank] -= length
        return False

    def _credit_all(self) -> None:
        """Begins a lap. The credit of a run without samples stays bounded."""
        for slot, quantum in self._quanta().items():
            flow = self._flows[slot]
            assert flow.credit is not None
            flow.credit = min(flow.credit, self._max_tokens) + quantum

    def _quanta(self) -> dict[int, float]:
        """Returns the tokens that a lap gives each run: the heaviest share gets a row's."""
        shares: dict[str | int, list[float]] = {}
        for slot, flow in self._flows.items():
            shares.setdefault(slot if flow.share is None else flow.share, []).append(flow.weight)
        heaviest = max(flow.weight for flow in self._flows.values())
        parts = {share: max(weights) / sum(weights) / heaviest for share, weights in shares.items()}
        return {
            slot: self._max_tokens * flow.weight * parts[slot if flow.share is None else flow.share]
            for slot, flow in self._flows.items()
        }

    def _begin_with(self, first: int) -> None:
        order = list(self._flows)
        start = order.index(first)
        self._flows = {slot: self._flows[slot] for slot in order[start:] + order[:start]}
