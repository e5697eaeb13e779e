"""The scheduler's view of the source of examples, `counterpoint/environments/mix.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class ExampleSource(Protocol):
    """The source of examples. Only the scheduler's rules change it, so both are saved as one state."""

    def next(self) -> tuple[str, int]:
        """Returns environment and index of the next example."""

    def observe(self, environment: str, index: int, rewards: Sequence[float]) -> None:
        """Takes up the rewards of a group, by which it may choose."""

    def drawn_in_vain(self, environment: str) -> None:
        """A group of the environment was dropped as too stale: it does not count towards the environment's share."""

    def take_metrics(self) -> dict[str, float]:
        """Returns metrics by name, of events since the last call."""

    def state(self) -> dict[str, Any]:
        """Returns its position, for msgpack."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from `state`. Raises `ValueError`, changing nothing, for a state that does not fit."""
