"""Which nodes to test together in each round of a node check, and which node the results blame. Pure.

A collective between two nodes that fails shows that one of them is bad, but not which one. Hence the method of DLRover's
network check: test disjoint pairs, then test each suspect with a node that is known to be good. A node is *good* once a pair
with it passed, *bad* once a pair of it and a good node failed, and a *suspect* between. Without any good node, suspects meet
suspects in new pairs. No pair is tested twice. A slow node makes its whole pair slow, so every node meets two others where
there are that many, and counts with its fastest pair.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

MOST_ROUNDS = 6
"""Rounds after which the remaining suspects stay suspects: without a network every pair takes its whole deadline."""

PARTNERS = 2
"""How many others every node meets, where there are that many."""

Pair = tuple[str, str]


class PairCheck:
    """The pairs of one node check and their results; nodes may leave between rounds."""

    def __init__(self, nodes: Iterable[str] = (), most_rounds: int = MOST_ROUNDS) -> None:
        self._met: dict[str, dict[str, float | None]] = {node: {} for node in nodes}
        """The nodes that each node has met, with the seconds of their collective, None if it failed."""
        self._left = most_rounds

    @property
    def seconds(self) -> dict[str, float]:
        """The duration of each good node's fastest pair."""
        passed = {node: [time for time in met.values() if time is not None] for node, met in self._met.items()}
        return {node: min(times) for node, times in passed.items() if times}

    @property
    def good(self) -> set[str]:
        """Nodes of which a pair passed."""
        return {*self.seconds}

    @property
    def bad(self) -> set[str]:
        """Nodes that failed together with a good one, and passed with none."""
        good = self.good
        return {node for node, met in self._met.items() if node not in good and good & met.keys()}

    @property
    def suspects(self) -> set[str]:
        """Nodes of a failed pair of which nobody knows who was the cause."""
        return {node for node, met in self._met.items() if met} - self.good - self.bad

    def leave(self, node: str) -> None:
        """Forgets a node. Who failed with it only is no suspect any more."""
        for other in self._met.pop(node, {}):
            if self._met[other][node] is None:
                del self._met[other][node]

    def next_round(self) -> list[Pair]:
        """Returns disjoint pairs to test at the same time; none once the check is complete.

        Every pair returned must be `record`ed, or one of its nodes must `leave`, before the next call.
        """
        good, bad, suspects, met = self.good, self.bad, self.suspects, self._met
        free = [node for node in met if node not in bad]
        needing = {node for node in free if node in suspects or len(met[node]) < min(PARTNERS, len(free) - 1)}
        free.sort(key=lambda node: (node not in suspects, len(met[node])))
        pairs: list[Pair] = []
        while free and self._left:
            node = free.pop(0)
            others = [other for other in free if other not in met[node] and (node in needing or other in needing)]
            if others:  # a suspect meets good nodes first, any other node those that need a meeting
                partner = min(others, key=lambda o: (node in suspects and o not in good, o not in needing, len(met[o])))
                free.remove(partner)
                pairs.append((node, partner))
        self._left -= bool(pairs)
        return pairs

    def record(self, pair: Pair, seconds: float | None) -> None:
        """Takes the duration of a pair's collective, None if it failed. A node that has left meanwhile is ignored."""
        first, second = pair
        if first in self._met and second in self._met:
            self._met[first][second] = self._met[second][first] = seconds


def stragglers(rates: Mapping[str, float], ratio: float) -> dict[str, float]:
    """Returns the nodes whose rate (higher is better) is below `ratio` times the median, with their share of the median."""
    if len(rates) < 2:
        return {}
    median = statistics.median(rates.values())
    return {node: rate / median for node, rate in rates.items() if rate < ratio * median}
