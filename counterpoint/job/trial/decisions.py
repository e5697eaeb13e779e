"""Decides when a trial ends, and by what. Pure: `counterpoint/job/trial/conduct.py` tells it what the branches have measured.

A verdict depends on the measurements of both branches and on the tokens that they have used, in the order of each, and
neither on when these came nor on who was killed meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from counterpoint.job.trial.sequence import DifferenceSequence, SequenceInterval

Side = Literal["without", "with"]
"""A branch: without the change, and with it."""

SIDES: tuple[Side, Side] = "without", "with"

LEAST = 0.02
"""The part of the rewards' range that a mean difference has to exceed: two trainings of one configuration differ, too. Of 100
simulated trials without a change (`tests/job/trial/simulated_run.py`) none is decided; without this bound 6 are."""

MOST_MISSING = 0.1
"""The share of examples that may have failed on either side; the evaluations of such a step say more about the failures."""

ExampleKey = tuple[str, int]
"""An example: its environment, and its index there."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What a branch has measured after a step, on the held-out examples."""

    side: Side
    step: int
    spent: int
    """The tokens of this branch so far: trained and evaluated, prompts included."""
    rewards: Mapping[ExampleKey, float | None]
    """The mean reward of each held-out example; None if an attempt failed."""
    bounds: tuple[float, float]
    """The least and the greatest reward, the same in all measurements."""


@dataclass(frozen=True, slots=True)
class TrialVerdict:
    """What a trial has found. Rewards are in the environment's unit."""

    verdict: Literal["better", "worse", "undecided"]
    """The fate of the branch with the change, beside that without it."""
    reason: str
    """Why the trial ended here, in words."""
    difference: SequenceInterval | None
    """The mean difference of held-out rewards, with the change less without it, and its interval, which holds with 95 % whenever
    the trial ends. None if nothing was compared."""
    pairs: int
    passes: int
    """The evaluations of both branches that were compared."""
    step: int
    """The last compared step; 0 without any."""
    tokens: int
    """The tokens of both branches, also those used beyond the last comparison until they had ended."""


@dataclass(slots=True)
class _Branch:
    waiting: dict[int, HeldOut] = field(default_factory=dict)
    """Measurements of steps that the other branch has not measured."""
    spent: int = 0
    """The most tokens that it was said to have used."""
    has_ended: bool = False
    """Whether a measurement came after it had used its half of the tokens, or none will come. Later ones do not count."""


class TrialDecisions:
    """The state of one trial."""

    def __init__(self, first: int, tokens: int, least: float = LEAST) -> None:
        """`first` is the step that the branches have in common, `tokens` the budget of both, each of which has a half.

        A mean difference of at most `least` of the rewards' range counts as none.
        """
        self._first, self._tokens, self._least = first, tokens, least
        self._branches: dict[Side, _Branch] = {side: _Branch() for side in SIDES}
        self._sequence: DifferenceSequence | None = None
        """None before the first comparison."""
        self._passes = self._step = 0
        self.verdict: TrialVerdict | None = None

    @property
    def interval(self) -> SequenceInterval | None:
        """The newest interval of the mean difference; None before the first comparison."""
        return None if self._sequence is None else self._sequence.interval

    def measured(self, found: HeldOut) -> None:
        """Takes a measurement in. The steps of a branch come in their order; after the verdict nothing counts."""
        branch = self._branches[found.side]
        other = self._branches["with" if found.side == "without" else "without"]
        if self.verdict is not None or branch.has_ended or found.step <= self._first:  # the same weights
            return
        branch.spent = max(branch.spent, found.spent)
        if (pair := other.waiting.pop(found.step, None)) is None:
            branch.waiting[found.step] = found
        elif found.side == "with":
            self._compare(pair, found)
        else:
            self._compare(found, pair)
        if 2 * found.spent >= self._tokens:
            self._end(branch)

    def spent(self, side: Side, tokens: int) -> None:
        """Notes how many tokens a branch has used by now, whatever it has measured. A verdict counts those noted later, too."""
        branch = self._branches[side]
        branch.spent = max(branch.spent, tokens)
        if self.verdict is not None:
            self.verdict = replace(self.verdict, tokens=sum(each.spent for each in self._branches.values()))

    def is_to_end(self, side: Side) -> bool:
        """Whether a branch has used its half of the tokens, so that its process is to end. Say so by `ended`, once it has."""
        branch = self._branches[side]
        return branch.has_ended or 2 * branch.spent >= self._tokens

    def ended(self, side: Side) -> None:
        """Notes that a branch measures nothing more: it has made all its steps, or was ended since its tokens were used."""
        self._end(self._branches[side])

    def _end(self, branch: _Branch) -> None:
        branch.has_ended = True
        spent = [each.spent for each in self._branches.values()]
        if self.verdict is None and all(each.has_ended for each in self._branches.values()):
            used = any(2 * each >= self._tokens for each in spent)
            reason = f"the {self._tokens:,} tokens are used" if used else "both branches have made all steps"
            self._conclude("undecided", reason, sum(spent))

    def _compare(self, plain: HeldOut, changed: HeldOut) -> None:
        examples = len(plain.rewards.keys() | changed.rewards.keys())
        differences = _differences(plain, changed)
        if not differences or len(differences) < (1 - MOST_MISSING) * examples:
            return
        span = plain.bounds[1] - plain.bounds[0]
        sequence = self._sequence = self._sequence or DifferenceSequence(span)
        sequence.add(differences, examples)
        self._passes, self._step = self._passes + 1, plain.step
        least, tokens = self._least * span, plain.spent + changed.spent
        if sequence.interval.low > least:
            self._conclude("better", f"the whole interval is above {least:g}", tokens)
        elif sequence.interval.high < -least:
            self._conclude("worse", f"the whole interval is below {-least:g}", tokens)

    def _conclude(self, verdict: Literal["better", "worse", "undecided"], reason: str, tokens: int) -> None:
        pairs = 0 if self._sequence is None else self._sequence.pairs
        self.verdict = TrialVerdict(verdict, reason, self.interval, pairs, self._passes, self._step, tokens)


def _differences(plain: HeldOut, changed: HeldOut) -> list[float]:
    """The differences of the examples that ended on both sides, in the order of the examples."""
    low, high = plain.bounds
    both = ((changed.rewards[key], plain.rewards[key]) for key in sorted(plain.rewards.keys() & changed.rewards.keys()))
    return [
        min(high, max(low, one)) - min(high, max(low, other))
        for one, other in both
        if one is not None and other is not None
    ]
