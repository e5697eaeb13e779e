"""A trial's decisions: the verdict follows from what was measured alone, and few trials of nothing find anything."""

from __future__ import annotations

import random as randomness
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.job.trial.decisions import LEAST, SIDES, HeldOut, Side, TrialDecisions, TrialVerdict
from tests.job.trial.simulated_run import BEGIN, TOKENS_OF_RUN, measured_branches

UNLIMITED = 10**9

UNIT = (0.0, 1.0)


def measured(side: Side, step: int, reward: float, examples: int = 100) -> HeldOut:
    return HeldOut(side, step, 100 * step, {("sums", index): reward for index in range(examples)}, UNIT)


def after(found: Iterable[HeldOut], tokens: int = UNLIMITED, least: float = LEAST) -> TrialDecisions:
    """The decisions after both branches have measured this, and have made all their steps."""
    decisions = TrialDecisions(BEGIN, tokens, least)
    for each in found:
        decisions.measured(each)
    for side in SIDES:
        decisions.ended(side)
    return decisions


def verdict_of(found: Iterable[HeldOut], tokens: int = UNLIMITED, least: float = LEAST) -> TrialVerdict:
    verdict = after(found, tokens, least).verdict
    assert verdict is not None
    return verdict


@pytest.mark.parametrize(("change", "expected"), [(0.9, "better"), (0.1, "worse")])
def test_a_large_difference_is_found_at_once(change: float, expected: str) -> None:
    decisions = TrialDecisions(BEGIN, UNLIMITED)
    for side, step, reward in [("with", BEGIN, 0.0), ("without", BEGIN, 1.0), ("with", BEGIN + 1, change)]:
        decisions.measured(measured(side, step, reward))  # type: ignore[arg-type]
        assert decisions.interval is None, "the common step has the same weights"
    decisions.measured(measured("without", BEGIN + 1, 0.5))
    found = decisions.verdict
    assert found is not None
    assert (found.verdict, found.step, found.pairs, found.tokens) == (expected, BEGIN + 1, 100, 200 * (BEGIN + 1))
    assert found.difference is not None
    assert found.difference.estimate == pytest.approx(change - 0.5)
    decisions.measured(measured("with", BEGIN + 2, 1.0))
    assert decisions.verdict is found


def test_the_tokens_end_it_and_so_do_the_last_steps() -> None:
    found = verdict_of([measured(side, step, 0.5) for step in (11, 12) for side in SIDES], tokens=2200)
    assert (found.verdict, found.reason, found.step, found.tokens) == (
        "undecided",
        "the 2,200 tokens are used",
        11,
        2200,
    )
    assert found.difference is not None
    assert (found.difference.estimate, found.difference.low) == (0.0, -found.difference.high)
    found = verdict_of([measured(side, 11, 0.5) for side in SIDES])
    assert (found.verdict, found.reason) == ("undecided", "both branches have made all steps")


def test_the_tokens_end_it_also_where_the_branches_measure_after_other_steps() -> None:
    apart = [
        measured("with", 11, 1.0),
        measured("without", 12, 0.0),
        measured("with", 13, 1.0),
        measured("with", 12, 1.0),
    ]
    found = verdict_of(apart, tokens=2300)
    assert (found.verdict, found.difference, found.step, found.tokens) == ("undecided", None, 0, 2500)


def test_a_branch_that_has_used_its_half_is_to_end_and_all_its_tokens_count() -> None:
    """Whether it has measured or not, and while the other one goes on."""
    decisions = TrialDecisions(BEGIN, 4000)
    decisions.measured(measured("with", 11, 0.5))
    decisions.spent("with", 1900)
    assert not any(map(decisions.is_to_end, SIDES))
    decisions.spent("with", 2300)
    assert [decisions.is_to_end(side) for side in SIDES] == [False, True]
    decisions.measured(measured("with", 12, 0.5))  # made before its process had ended
    decisions.ended("with")
    decisions.measured(measured("with", 13, 1.0))
    for step, ends in [(11, False), (12, False), (13, False), (20, True)]:
        decisions.measured(measured("without", step, 0.5))
        assert decisions.is_to_end("without") == ends
    found = decisions.verdict
    assert found is not None
    assert (found.verdict, found.reason, found.passes, found.step) == ("undecided", "the 4,000 tokens are used", 2, 12)
    assert found.tokens == 2300 + 2000
    decisions.spent("without", 2100)  # until its process had ended
    assert decisions.verdict is not None
    assert decisions.verdict.tokens == 2300 + 2100


def test_branches_whose_evaluations_fail_end_with_their_tokens() -> None:
    decisions = TrialDecisions(BEGIN, 1000)
    for side in SIDES:
        decisions.spent(side, 600)
        assert decisions.is_to_end(side)
        assert decisions.verdict is None
        decisions.ended(side)
    found = decisions.verdict
    assert found is not None
    assert (found.verdict, found.reason, found.difference, found.tokens) == (
        "undecided",
        "the 1,000 tokens are used",
        None,
        1200,
    )


def test_a_step_of_which_many_examples_failed_is_not_compared() -> None:
    rewards: dict[tuple[str, int], float | None] = {
        ("sums", index): None if index < 11 else 1.0 for index in range(100)
    }
    found = verdict_of([HeldOut("with", 11, 1, rewards, UNIT), measured("without", 11, 0.0)])
    assert (found.verdict, found.pairs) == ("undecided", 0)
    rewards[("sums", 0)] = 1.0
    found = verdict_of([HeldOut("with", 12, 1, rewards, UNIT), measured("without", 12, 0.0)])
    assert (found.verdict, found.pairs, found.passes) == ("better", 90, 1)


lines = st.lists(st.tuples(st.integers(1, 3), st.floats(0, 1)), max_size=8)


@given(lines, lines, st.randoms(use_true_random=False))
def test_a_verdict_does_not_depend_on_who_was_first(
    plain: list[tuple[int, float]], changed: list[tuple[int, float]], random: randomness.Random
) -> None:
    """Each branch measures in the order of its steps, and may skip some; the two come in any order."""

    def of(side: Side, gaps: list[tuple[int, float]]) -> list[HeldOut]:
        step, found = BEGIN, []
        for gap, reward in gaps:
            step += gap
            found.append(measured(side, step, reward, examples=20))
        return found

    verdicts = []
    for _ in range(3):
        waiting = [of("without", plain), of("with", changed)]
        order: list[HeldOut] = []
        while any(waiting):
            order.append(random.choice([each for each in waiting if each]).pop(0))
        verdicts.append(verdict_of(order, tokens=3000))
    assert verdicts[0] == verdicts[1] == verdicts[2]


def outcomes(least: float = LEAST, **change: float) -> tuple[Counter[str], list[int]]:
    found = [verdict_of(measured_branches(seed, **change), least=least) for seed in range(100)]
    return Counter(each.verdict for each in found), [each.tokens for each in found]


@pytest.mark.slow
def test_of_a_hundred_trials_of_no_change_at_most_five_find_one() -> None:
    verdicts, _ = outcomes()
    assert verdicts["undecided"] >= 95


@pytest.mark.slow
@pytest.mark.parametrize(("change", "expected"), [({"rate": 10.0}, "better"), ({"sign": -1.0}, "worse")])
def test_a_large_change_is_found_for_fewer_tokens_than_two_runs(change: dict[str, float], expected: str) -> None:
    verdicts, tokens = outcomes(**change)
    assert verdicts[expected] >= 90
    assert sum(each < 2 * TOKENS_OF_RUN for each in tokens) >= 90
