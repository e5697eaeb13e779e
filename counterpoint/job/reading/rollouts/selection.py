"""What a list of rollouts is limited to and sorted by, and choosing its part from the columns of the indexes.

Columns are compared as arrays, and only the rows of the part are made: steps of a million rows take a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from counterpoint.job.reading.rollouts.line_index import (
    OUTCOMES,
    IndexedLine,
    LineColumns,
    Outcome,
    StepIndex,
    outcome_of,
    players_of,
    shown_name,
)
from counterpoint.job.reading.rollouts.rollout_records import RolloutRecord
from counterpoint.transport.config import Config

Sort = Literal["worst", "best", "newest", "longest"]

BARS = 20

Placed = tuple[int, IndexedLine]
"""A step, and a row of it."""


@dataclass(frozen=True, slots=True)
class RowFilter:
    """What a list is limited to. None: no limit."""

    environment: str | None = None
    outcome: Outcome | None = None
    least_reward: float | None = None
    most_reward: float | None = None
    player: str | None = None

    def takes_record(self, record: RolloutRecord) -> bool:
        """Whether the record is in the list."""
        reward = record.reward
        return (
            (self.environment is None or shown_name(record.environment) == self.environment)
            and (self.outcome is None or outcome_of(record) == self.outcome)
            and (self.least_reward is None or (reward is not None and reward >= self.least_reward))
            and (self.most_reward is None or (reward is not None and reward <= self.most_reward))
            and (self.player is None or self.player in players_of(record))
        )

    def taken(self, columns: LineColumns) -> NDArray[np.bool_]:
        """Says of each row of a step whether it is in the list: as `takes_record` of its record."""
        taken_R = np.ones(len(columns.rewards_R), bool)
        if self.environment is not None:
            taken_R &= np.isin(columns.environments_R, columns.codes(lambda name: name == self.environment))
        if self.outcome is not None:
            taken_R &= columns.outcomes_R == OUTCOMES.index(self.outcome)
        if self.least_reward is not None:
            taken_R &= columns.rewards_R >= self.least_reward
        if self.most_reward is not None:
            taken_R &= columns.rewards_R <= self.most_reward
        if (player := self.player) is not None:
            has_player = columns.codes(lambda name: isinstance(name, tuple) and player in name)
            taken_R &= np.isin(columns.players_R, has_player)
        return taken_R


class Bars(Config):
    """A histogram; empty without values."""

    edges: list[float]
    """The beginning of each bar, and the end of the last."""
    counts: list[int]
    """How many rollouts are in each."""


def histogram(values_N: NDArray[np.float64]) -> Bars:
    """Returns the histogram of the finite values, in at most `BARS` stretches."""
    finite_N = values_N[np.isfinite(values_N)]
    if finite_N.size == 0:
        return Bars(edges=[], counts=[])
    least, greatest = float(finite_N.min()), float(finite_N.max())
    with np.errstate(over="ignore", invalid="ignore"):
        edges = np.linspace(least, greatest, BARS + 1)
        can_be_divided = bool(np.isfinite(edges).all() and (np.diff(edges) > 0).all())
    if not can_be_divided:  # one value, neighbouring numbers, or the whole range of float64
        return Bars(edges=[least, greatest], counts=[finite_N.size])
    return Bars(edges=edges.tolist(), counts=np.histogram(finite_N, bins=edges)[0].tolist())


@dataclass(frozen=True, slots=True)
class Selection:
    """A part of a list."""

    part: list[Placed]
    total: int
    """Rows that the filter takes."""
    of: int
    """The number of all rows."""
    environments: set[str]
    """The environments in all rows."""
    players: set[str]
    rewards: Bars
    """Counts the rows that the filter takes and that have a reward."""
    lengths: Bars
    """The completion tokens of the rows that the filter takes."""


def select(
    indexes: Sequence[tuple[int, StepIndex]], wanted: RowFilter, sort: Sort, offset: int = 0, limit: int | None = None
) -> Selection:
    """Returns `limit` rows of these steps from `offset` on, sorted.

    Those without a reward come last where it is sorted by; equals stay in the order of the steps and files.
    """
    environments: set[str] = set()
    players: set[str] = set()
    keys, places = [np.empty(0)], [np.empty((2, 0), np.int64)]
    rewards, lengths = [np.empty(0)], [np.empty(0)]
    of = 0
    for position, (step, index) in enumerate(indexes):
        columns = index.columns()
        of += len(columns.rewards_R)
        environments.update(str(columns.names[code]) for code in np.unique(columns.environments_R))
        for code in np.unique(columns.players_R):
            players.update(name if isinstance(name := columns.names[code], tuple) else ())
        numbers_N = np.flatnonzero(wanted.taken(columns))
        keys.append(_keys(columns, step, sort)[numbers_N])
        rewards.append(columns.rewards_R[numbers_N])
        lengths.append(columns.completion_tokens_R[numbers_N].astype(np.float64))
        places.append(np.stack([np.full(len(numbers_N), position), numbers_N]))
    order_N = np.argsort(np.concatenate(keys), kind="stable")
    end = None if limit is None else offset + limit
    chosen = np.concatenate(places, axis=1)[:, order_N[offset:end]].T.tolist()
    part = [
        (indexes[position][0], row)
        for position, number in chosen
        if (row := indexes[position][1].row(number)) is not None
    ]
    bars = [histogram(np.concatenate(values)) for values in (rewards, lengths)]
    return Selection(part, len(order_N), of, environments, players, *bars)


def _keys(columns: LineColumns, step: int, sort: Sort) -> NDArray[np.float64]:
    """What each row of a step is sorted by, ascending; a NaN comes last."""
    if sort == "newest":
        return np.full(len(columns.rewards_R), -float(step))
    if sort == "longest":
        return -columns.completion_tokens_R.astype(np.float64)
    return columns.rewards_R if sort == "worst" else -columns.rewards_R
