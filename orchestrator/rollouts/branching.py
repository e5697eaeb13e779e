"""Counts the samples of a rollout and how many times its tokens they hold: the cost of requests that do not extend each other.

A turn with a prompt that extends no branch begins a sample, which has its whole prompt again (`trajectories.py`). An agent that
sends histories without the policy's reasoning does so in every turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from counterpoint.transport.records import Rollout

SAMPLES, FACTOR = "branches/samples_per_rollout", "branches/tokens_factor"
"""The metrics: samples of a trained rollout, and their tokens over those of its longest sample."""

SAID_FACTOR = 2.0
"""The least factor that a log line mentions."""

ADVICE = (
    "let the agent send the whole history, with the reasoning as it was answered (`reasoning_content`, thinking blocks), "
    "so that each request extends the last one; conversations that an agent holds beside each other need their samples. "
    "See docs/gateway.md, Histories and tokens"
)


def branch_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Returns the metrics of trained rollouts with known branches, or none without such rollouts.

    Several players never share a sample, so each player's longest counts.
    """
    played, samples, tokens, needed = 0, 0, 0, 0
    for rollout in rollouts:
        if rollout.error is not None or rollout.filtered_by is not None or not rollout.branches:
            continue
        longest: dict[str, int] = {}
        for branch in rollout.branches:
            if any(turn.trained_tokens for turn in branch.turns):
                player, length = branch.turns[0].player, len(branch.token_ids_T)
                longest[player] = max(longest.get(player, 0), length)
                samples, tokens = samples + 1, tokens + length
        played, needed = played + bool(longest), needed + sum(longest.values())
    return {SAMPLES: samples / played, FACTOR: tokens / needed} if played else {}


def in_words(lines: Sequence[Mapping[str, Any]]) -> str:
    """Returns a sentence about it, with the mean of steps' metrics lines, or an empty text below `SAID_FACTOR`."""
    lines = [line for line in lines if FACTOR in line and SAMPLES in line]
    if not lines:
        return ""
    samples, factor = (sum(line[name] for line in lines) / len(lines) for name in (SAMPLES, FACTOR))
    if factor < SAID_FACTOR:
        return ""
    return (
        f"a rollout is trained as {samples:.1f} samples, which have {factor:.1f} times the tokens of its longest one: its "
        "requests do not extend those before"
    )


class SaidOfBranches:
    """The last factor in a run's log. A new line follows once the factor has doubled."""

    def __init__(self) -> None:
        self._factor = 0.0

    def news(self, line: Mapping[str, Any]) -> str:
        """Returns the new sentence for a step's line, with the advice, or an empty text."""
        if not (words := in_words([line])) or line[FACTOR] < 2 * self._factor:
            return ""
        self._factor = line[FACTOR]
        return f"{words}; {ADVICE}"
