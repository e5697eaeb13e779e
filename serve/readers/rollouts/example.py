"""The attempts at one example across the steps of a run: how its reward changed while the policy was trained."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from serve.readers.rollouts.selection import Placed
from transport.config import Config

MOST_STEPS = 500
"""Steps of one answer, the newest."""

MOST_ATTEMPTS = 64
"""Attempts of one step that are named."""


class Attempts(Config):
    """The attempts of one step."""

    step: int
    """The step."""
    numbers: list[int]
    """Their lines in the step's file, at most 64."""
    rewards: list[float | None]
    """The reward of each of these; None if it failed."""
    count: int
    """How many there are."""
    mean: float | None
    """The mean over those with a reward; None if there is none."""
    least: float | None
    """The smallest reward."""
    most: float | None
    """The largest."""


def attempts_by_step(placed: Sequence[Placed]) -> tuple[list[Attempts], int]:
    """Returns the attempts of each step, the oldest first, and how many older steps are left out.

    `placed` has the newest step first.
    """
    found = []
    for step, group in groupby(placed, key=lambda each: each[0]):
        rows = [row for _, row in group]
        rewards = [row.reward for row in rows if row.reward is not None]
        found.append(
            Attempts(
                step=step,
                numbers=[row.number for row in rows[:MOST_ATTEMPTS]],
                rewards=[row.reward for row in rows[:MOST_ATTEMPTS]],
                count=len(rows),
                mean=sum(rewards) / len(rewards) if rewards else None,
                least=min(rewards, default=None),
                most=max(rewards, default=None),
            )
        )
    return found[:MOST_STEPS][::-1], max(0, len(found) - MOST_STEPS)
