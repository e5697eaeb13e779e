"""A source of examples for the scheduler's tests: numbers in order, so that the example of a group is its id."""

from __future__ import annotations

from typing import Any


class CountingMix:
    """`ExampleSource` over one endless environment."""

    def __init__(self) -> None:
        self.drawn = 0

    def next(self) -> tuple[str, int]:
        self.drawn += 1
        return "words", self.drawn - 1

    def state(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def restore(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]
