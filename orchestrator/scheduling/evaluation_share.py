"""Decides how many rollouts of an evaluation may be in flight beside training's. Pure: the scheduler's rules use it.

One evaluation is played at a time. While training has work, an evaluation takes at most its share of the capacity, rounded
down, at least one rollout, and leaves room for one group. That much is reserved for it as long as it has rollouts to start, or
groups would take every free place. If capacity holds one group only, the two take turns. Once training has started all its
groups, the evaluation takes all free places. For example, with a capacity of 64, a share of 0.25 and groups of 8, it gets 16
places.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Played:
    evaluation_id: int
    share: float
    to_start: int
    started: int = 0


class EvaluationShare:
    """The evaluation in progress, if there is one."""

    def __init__(self) -> None:
        self._played: _Played | None = None
        self.in_flight: set[tuple[int, int]] = set()
        """Evaluation and index of each rollout."""
        self.is_next = False
        """Whether the evaluation gets the next free place, if it cannot be both's: the last to start was a group."""

    @property
    def in_progress(self) -> int | None:
        """The id of the evaluation in progress."""
        return None if self._played is None else self._played.evaluation_id

    @property
    def to_start(self) -> int:
        """Its rollouts that have not started."""
        return 0 if self._played is None else self._played.to_start

    def request(self, evaluation_id: int, rollouts: int, share: float) -> None:
        """Begins an evaluation. Raises `ValueError` while another is in progress, or without rollouts."""
        if self._played is not None:
            raise ValueError(f"evaluation {evaluation_id} was requested, but {self.in_progress} is in progress")
        if rollouts < 1:
            raise ValueError(f"evaluation {evaluation_id} has {rollouts} rollouts; expected at least 1")
        self._played = _Played(evaluation_id, share, rollouts)

    def cancel(self) -> int | None:
        """Forgets the evaluation in progress and returns its id. Its rollouts in flight still count until they end."""
        evaluation_id, self._played = self.in_progress, None
        return evaluation_id

    def ended(self, evaluation_id: int, index: int) -> bool:
        """Counts a rollout's end, and returns whether it was the last of the evaluation in progress. Raises `ValueError`."""
        if (evaluation_id, index) not in self.in_flight:
            raise ValueError(f"rollout {index} of evaluation {evaluation_id} ended, but it is not in flight")
        self.in_flight.remove((evaluation_id, index))
        played = self._played
        if played is None or played.evaluation_id != evaluation_id or played.to_start or self.in_flight:
            return False
        self._played = None
        return True

    def allowed(self, capacity: int, group_size: int) -> int:
        """The most rollouts that may be in flight while training has work."""
        if self._played is None or capacity < 1:
            return 0
        return max(1, min(int(self._played.share * capacity), capacity - group_size))

    def reserved(self, capacity: int, group_size: int) -> int:
        """The places that training leaves to the evaluation, including those that it has taken."""
        wanted = len(self.in_flight) + self.to_start
        reserved = min(wanted, max(len(self.in_flight), self.allowed(capacity, group_size)))
        return max(len(self.in_flight), min(reserved, capacity - group_size))

    def start(self, most: int) -> tuple[int, int, int] | None:
        """Starts up to `most` rollouts, and returns the evaluation's id, the first one's index and their number."""
        played = self._played
        count = min(most, self.to_start)
        if played is None or count < 1:
            return None
        first = played.started
        played.started, played.to_start = first + count, played.to_start - count
        self.in_flight.update((played.evaluation_id, index) for index in range(first, first + count))
        self.is_next = False
        return played.evaluation_id, first, count
