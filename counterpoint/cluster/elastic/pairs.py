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
    """The pairs of one node check and their results; nodes may join and leave between rounds."""

    def __init__(self, nodes: Iterable[str] = (), most_rounds: int = MOST_ROUNDS) -> None:
        self._nodes: dict[str, None] = dict.fromkeys(nodes)
        self._most_rounds = most_rounds
        self._rounds = 0
        self._met: dict[str, set[str]] = {}
        self._failed_with: dict[str, set[str]] = {}
        self.good: set[str] = set()
        """Nodes of which a pair passed."""
        self.bad: set[str] = set()
        """Nodes that failed together with a good one."""
        self.seconds: dict[str, float] = {}
        """The duration of each good node's fastest pair."""

    @property
    def suspects(self) -> set[str]:
        """Nodes of a failed pair of which nobody knows who was the cause."""
        return {node for node in self._nodes if self._failed_with.get(node)} - self.good - self.bad

    def join(self, node: str) -> None:
        """Adds a node, or replaces one by its successor of the same name, of which nothing is known."""
        self.leave(node)
        self._nodes[node] = None
        self._rounds = 0

    def leave(self, node: str) -> None:
        """Forgets a node. Who failed with it only is no suspect any more."""
        self._nodes.pop(node, None)
        for other in self._met.pop(node, ()):
            self._met[other].discard(node)
        for other in self._failed_with.pop(node, ()):
            self._failed_with[other].discard(node)
        self.good.discard(node)
        self.bad.discard(node)
        self.seconds.pop(node, None)

    def next_round(self) -> list[Pair]:
        """Returns disjoint pairs to test at the same time; none once the check is complete.

        Every pair returned must be `record`ed, or one of its nodes must `leave`, before the next call.
        """
        if self._rounds == self._most_rounds:
            return []
        free = [node for node in self._nodes if node not in self.bad]
        suspects = self.suspects
        wanted = min(PARTNERS, len(free) - 1)
        needing = {node for node in free if node in suspects or len(self._meetings(node)) < wanted}
        free.sort(key=lambda node: (node not in suspects, len(self._meetings(node))))
        pairs: list[Pair] = []
        while free:
            node = free.pop(0)
            others = [other for other in free if other not in self._meetings(node)]
            if node not in needing:
                others = [other for other in others if other in needing]
            if others:
                partner = min(others, key=lambda other: self._preference(node in suspects, other, other in needing))
                free.remove(partner)
                pairs.append((node, partner))
        self._rounds += bool(pairs)
        return pairs

    def record(self, pair: Pair, seconds: float | None) -> None:
        """Takes the duration of a pair's collective, None if it failed. A node that has left meanwhile is ignored."""
        first, second = pair
        if first not in self._nodes or second not in self._nodes:
            return
        self._meetings(first).add(second)
        self._meetings(second).add(first)
        if seconds is not None:
            for node in pair:
                self.seconds[node] = min(seconds, self.seconds.get(node, seconds))
                self._clear(node)
            return
        self._failed_with.setdefault(first, set()).add(second)
        self._failed_with.setdefault(second, set()).add(first)
        if first in self.good and second not in self.good:
            self.bad.add(second)
        elif second in self.good and first not in self.good:
            self.bad.add(first)

    def _clear(self, node: str) -> None:
        """A pair with this node passed: whoever failed together with it was the cause."""
        self.bad.discard(node)
        self.good.add(node)
        self.bad |= self._failed_with.get(node, set()) - self.good

    def _meetings(self, node: str) -> set[str]:
        return self._met.setdefault(node, set())

    def _preference(self, suspected: bool, other: str, needing: bool) -> tuple[bool, bool, int]:
        """Orders the possible partners: a suspect meets good nodes first, any other node those that need a meeting."""
        return (suspected and other not in self.good, not needing, len(self._meetings(other)))


def stragglers(rates: Mapping[str, float], ratio: float) -> dict[str, float]:
    """Returns the nodes whose rate (higher is better) is below `ratio` times the median, with their share of the median."""
    if len(rates) < 2:
        return {}
    median = statistics.median(rates.values())
    return {node: rate / median for node, rate in rates.items() if rate < ratio * median}
