"""One node check as a pure state machine: each node alone, then pairs in rounds (`pairs`), then who is abnormal and who slow.

`rounds.Rounds` owns it. Workers may come and go while it runs: who comes is measured, and then meets the others.
"""

from __future__ import annotations

from counterpoint.cluster.elastic.events import CheckPair, MeasureNode, NodeMeasured, PairChecked, WorkerId
from counterpoint.cluster.elastic.pairs import PairCheck, stragglers

PAIR_RATE = "collective"
"""The name of the rate that comes from a node's fastest pair."""


class NodeCheck:
    """The check of that number."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self._workers: dict[str, WorkerId] = {}
        self._measuring: set[WorkerId] = set()
        self._testing: set[tuple[WorkerId, WorkerId]] = set()
        self._rates: dict[str, dict[str, float]] = {}
        self._failed: dict[WorkerId, str] = {}
        self._pair_reasons: dict[str, str] = {}
        self._pairs = PairCheck()
        self._left_to_test = True

    @property
    def complete(self) -> bool:
        """Whether nothing is outstanding and no pair is left to test."""
        return not self._measuring and not self._testing and not self._left_to_test

    def add(self, worker: WorkerId) -> list[MeasureNode]:
        """Begins with a worker's node; replaces an earlier incarnation."""
        if (earlier := self._workers.get(worker.name)) is not None:
            self._forget(earlier)
        self._workers[worker.name] = worker
        self._measuring.add(worker)
        self._left_to_test = True
        return [MeasureNode(self.attempt, worker)]

    def drop(self, *workers: WorkerId) -> list[CheckPair]:
        """Forgets workers; an unfinished test with one of them counts for nobody."""
        for worker in workers:
            self._forget(worker)
        return self._advance()

    def _forget(self, worker: WorkerId) -> None:
        if self._workers.get(worker.name) != worker:
            return
        del self._workers[worker.name]
        self._measuring.discard(worker)
        self._testing = {pair for pair in self._testing if worker not in pair}
        self._rates.pop(worker.name, None)
        self._failed.pop(worker, None)
        self._pairs.leave(worker.name)

    def measured(self, event: NodeMeasured) -> list[CheckPair]:
        """Takes a node's rates."""
        if event.attempt != self.attempt or event.worker not in self._measuring:
            return []
        self._measuring.discard(event.worker)
        if event.measured is None:
            self._failed[event.worker] = event.reason
        else:
            self._rates[event.worker.name] = dict(event.measured.rates)
            self._pairs.join(event.worker.name)
        return self._advance()

    def pair_checked(self, event: PairChecked) -> list[CheckPair]:
        """Takes the result of a pair."""
        pair = (event.first, event.second)
        if event.attempt != self.attempt or pair not in self._testing:
            return []
        self._testing.discard(pair)
        self._pairs.record((event.first.name, event.second.name), event.seconds)
        if event.seconds is None:
            for worker, other in (pair, pair[::-1]):
                self._pair_reasons[worker.name] = f"its collective with {other.name} failed: {event.reason}"
        return self._advance()

    def _advance(self) -> list[CheckPair]:
        """Returns the next round of pairs, once nothing is outstanding."""
        if self._measuring or self._testing:
            return []
        tests = [(self._workers[first], self._workers[second]) for first, second in self._pairs.next_round()]
        self._left_to_test = bool(tests)
        self._testing.update(tests)
        return [CheckPair(self.attempt, first, second) for first, second in tests]

    @property
    def abnormal(self) -> dict[WorkerId, str]:
        """Who is to be started again, and why: nodes that failed alone, bad ones, and suspects that nobody could clear."""
        found = dict(self._failed)
        for name in sorted(self._pairs.bad):
            found[self._workers[name]] = f"{self._pair_reasons[name]}; the other one is good"
        for name in sorted(self._pairs.suspects):
            found[self._workers[name]] = f"{self._pair_reasons[name]}; no good node is known to compare with"
        return found

    @property
    def passed(self) -> list[WorkerId]:
        """The workers that are not abnormal."""
        abnormal = self.abnormal
        return [worker for worker in self._workers.values() if worker not in abnormal and worker not in self._measuring]

    def stragglers(self, ratio: float) -> list[str]:
        """Returns a line for each rate of a node that is below `ratio` times the median."""
        rates: dict[str, dict[str, float]] = {}
        for name, own in self._rates.items():
            for rate, value in own.items():
                rates.setdefault(rate, {})[name] = value
        if len(self._pairs.seconds) > 2:  # of two nodes each is in the same pair
            rates[PAIR_RATE] = {name: 1 / max(seconds, 1e-9) for name, seconds in self._pairs.seconds.items()}
        return [
            f"{name} is a straggler: its {rate} rate is {share:.0%} of the median"
            for rate, values in sorted(rates.items())
            for name, share in sorted(stragglers(values, ratio).items())
        ]
