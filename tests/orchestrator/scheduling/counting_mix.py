"""A source of examples for the scheduler's tests: numbers in order, so that the example of a group is its id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class CountingMix:
    """`ExampleSource` over one endless environment."""

    def __init__(self) -> None:
        self.drawn = self.in_vain = 0
        self.observed: list[Any] = []
        """Index and rewards of each group that left."""

    def next(self) -> tuple[str, int]:
        self.drawn += 1
        return "words", self.drawn - 1

    def observe(self, environment: str, index: int, rewards: Sequence[float]) -> None:
        self.observed.append([index, list(rewards)])

    def drawn_in_vain(self, environment: str) -> None:
        self.in_vain += 1

    def take_metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "in_vain": self.in_vain, "observed": list(self.observed)}

    def restore(self, state: dict[str, Any]) -> None:
        self.drawn, self.in_vain = state["drawn"], state.get("in_vain", 0)
        self.observed = list(state.get("observed", []))
