"""Each rule finds its fault in made-up metrics, and is silent where these are as they should be."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.orchestrator.early_warnings.rules import (
    RULES,
    Sign,
    found_in,
)
from counterpoint.orchestrator.early_warnings.seen import FIRST, MOST_NAMES, NEWEST, Seen, trend

STEPS = 120

Metric = Callable[[int], float] | float

PAID = {"math": ("right", "brief")}
"""The parts that raise the reward."""


def learning(step: int) -> float:
    """A reward that rises from 0.3 to 0.8 and scatters."""
    return 0.3 + 0.5 * min(1.0, step / STEPS) + random.Random(step).gauss(0, 0.03)


HEALTHY: dict[str, Metric] = {
    "reward/mean": learning,
    "reward/min": 0.0,
    "reward/max": 1.0,
    "reward/math/mean": learning,
    "reward/code/mean": lambda step: learning(step + 7),
    "length/math/cut": 0.3,
    "length/math/cut_reward": lambda step: learning(step + 3),
    "entropy": lambda step: 0.5 - 0.3 * min(1.0, step / STEPS),
    "ess/mean": 0.97,
    "ess/1": 0.99,
    "ess/2": 0.95,
    "masked_share": 0.02,
    "grad_kept": lambda step: 0.4 if step % 3 else 1.0,
    "reference_kl": 0.05,
    "answers/math/repeated": 0.4,
    "answers/math/shared": 0.1,
    "groups/no_difference": 0.5,
    "environment/math/total/mean": learning,
    "environment/math/right/mean": learning,
    "environment/math/brief/mean": lambda step: 0.5 + random.Random(-step).gauss(0, 0.05),
}


def seen(steps: int = STEPS, **changes: Metric) -> Seen:
    return seen_of(HEALTHY | changes, steps)


def seen_of(metrics: Mapping[str, Metric], steps: int = STEPS) -> Seen:
    found = Seen(PAID)
    for step in range(1, steps + 1):
        line = {name: value(step) if callable(value) else value for name, value in metrics.items()}
        found.add({"step": step, "changes": {}, **line})
    return found


def falling(step: int) -> float:
    return 0.8 - 0.5 * min(1.0, step / STEPS) + random.Random(step).gauss(0, 0.03)


def flat(step: int) -> float:
    return 0.4 + random.Random(step).gauss(0, 0.03)


FAULTS: dict[str, tuple[dict[str, Metric], Sign, str]] = {
    "all are cut": ({"length/math/cut": 1.0}, Sign.CUT, "math"),
    "the cut have less": ({"length/math/cut_reward": 0.1}, Sign.CUT, "math"),
    "entropy collapses": ({"entropy": lambda step: 0.5 if step < 20 else 0.03}, Sign.ENTROPY, ""),
    "entropy explodes": ({"entropy": lambda step: 0.5 if step < 20 else 1.7}, Sign.ENTROPY, ""),
    "lag costs": ({"ess/mean": 0.4, "ess/2": 0.1}, Sign.STALE_WEIGHTS, ""),
    "too much is masked": ({"masked_share": 0.5}, Sign.MASKED, ""),
    "always clipped": ({"grad_kept": 0.2}, Sign.GRADIENT_CLIPPED, ""),
    "one environment pays": ({"reward/code/mean": falling}, Sign.TRADE_OFF, "code"),
    "nothing moves": ({"reward/mean": flat}, Sign.PLATEAU, ""),
    "far away": ({"reference_kl": 0.9}, Sign.DRIFT, ""),
    "a part is given up": ({"environment/math/brief/mean": falling}, Sign.PARTS, "math: brief"),
    "one answer to all": (
        {"answers/math/shared": lambda step: 0.1 if step < 20 else 0.9},
        Sign.CONSTANT_ANSWER,
        "math",
    ),
    "siblings alike": ({"answers/math/repeated": 0.9}, Sign.REPEATED, "math"),
    "few groups teach": ({"groups/no_difference": 0.8}, Sign.FEW_DIFFERENCES, ""),
}


def test_a_healthy_run_has_no_sign_at_any_step() -> None:
    assert {step: found_in(seen(step)) for step in range(1, STEPS) if found_in(seen(step))} == {}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    changes, sign, about = FAULTS[name]
    (found,) = found_in(seen_of(HEALTHY | changes))
    assert (found.sign, found.about) == (sign, about)
    assert found.reason
    assert found.advice


def test_every_sign_has_a_fault_here() -> None:
    assert {sign for _, sign, _ in FAULTS.values()} | {Sign.HELD_OUT} == {*Sign}
    assert len(RULES) == len(Sign)


def evaluated(scores: Mapping[int, float], reward: Metric = learning) -> Seen:
    found = seen_of(HEALTHY | {"reward/mean": reward})
    name = "evaluation/unseen/reward"
    again = Seen()
    for step in range(1, STEPS + 1):
        score = scores.get(step)
        line = {} if score is None else {name: score, f"{name}/low": score - 0.05, f"{name}/high": score + 0.05}
        line |= {name.replace("reward", "pass@1"): value for name, value in line.items()}
        again.add({"step": step, "reward/mean": dict(found.points("reward/mean"))[step], **line})
    return again


def test_a_score_that_falls_below_its_interval_while_the_reward_rises() -> None:
    (found,) = found_in(evaluated({20: 0.5, 60: 0.6, 100: 0.45}))
    assert (found.sign, found.about) == (Sign.HELD_OUT, "unseen")
    assert found.figure == pytest.approx(-0.15)
    assert "step 60" in found.advice
    assert found_in(evaluated({20: 0.5, 60: 0.6, 100: 0.52})) == []  # within the intervals
    assert Sign.HELD_OUT not in {each.sign for each in found_in(evaluated({60: 0.6, 100: 0.4}, falling))}


def test_what_lag_costs_is_said() -> None:
    (found,) = found_in(seen_of(HEALTHY | {"ess/mean": 0.4, "ess/2": 0.1}))
    assert found.figure == 0.4
    assert "99% at 1, 10% at 2" in found.reason


@pytest.mark.parametrize(
    "metrics",
    [
        {"entropy": lambda step: 0.5 if step < 20 else 0.01},
        {"answers/math/repeated": 1.0},
        {"groups/no_difference": 1.0},
    ],
)
def test_a_solved_task_is_no_fault(metrics: dict[str, Metric]) -> None:
    solved: dict[str, Metric] = {"reward/mean": lambda step: min(0.97, 0.3 + step / 60)}
    assert found_in(seen_of(HEALTHY | solved | metrics)) == []


def test_cut_answers_that_become_fewer_are_no_fault() -> None:
    changes: dict[str, Metric] = {
        "length/math/cut_reward": 0.0,
        "length/math/cut": lambda step: max(0.0, 0.8 - 0.05 * step),
    }
    assert [step for step in range(1, STEPS) if found_in(seen_of(HEALTHY | changes, step))] == []


@pytest.mark.parametrize("part", ["malformed", "too-long"])
def test_a_part_that_does_not_raise_the_reward_is_not_given_up(part: str) -> None:
    """A penalty, or one of weight 0."""
    assert found_in(seen_of(HEALTHY | {f"environment/math/{part}/mean": falling})) == []


def test_a_turn_is_no_evaluation() -> None:
    found = Seen()
    for step in range(1, STEPS + 1):
        scores = {"v/reward/mean": step / STEPS, "v/e/reward/turn/1/mean": -step / STEPS, "turn/reward": step / STEPS}
        line = {f"evaluation/{name}{end}": score for name, score in scores.items() for end in ("", "/low", "/high")}
        found.add({"step": step, "reward/mean": step / STEPS, "reward/max": 1.0, **line})
    assert found_in(found) == []
    assert found.first("evaluation/turn/reward") is not None


ODD = st.sampled_from([1e100, -1e100, 1e308, -1e308, 5e-324, 0, 1, -1, True, 10**400, -(10**400), "1"])


NAMES = [
    *HEALTHY,
    *(f"evaluation/{of}{end}" for of in ("a/b", "a", "") for end in ("", "/low", "/high")),
    "evaluation/high",
]


@given(st.lists(st.dictionaries(st.sampled_from(NAMES),
       ODD | st.floats(allow_nan=True, allow_infinity=True) | st.integers() | st.none() | st.text(max_size=2)), max_size=30),
       st.sampled_from([5, 50]))  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_no_number_breaks_a_rule(lines: list[dict[str, Any]], times: int) -> None:
    found = Seen(PAID)
    for step, line in enumerate((lines * times)[:NEWEST]):
        found.add({"step": step, **line})
    found_in(found)


@pytest.mark.parametrize("value", [1e308, -1e308, 5e-324, 1e100, -1e100, 10**400])
def test_no_large_number_breaks_a_trend(value: float) -> None:
    lines = [dict.fromkeys(HEALTHY, value if step % 2 else -value) for step in range(NEWEST)]
    found = Seen(PAID)
    for step, line in enumerate(lines):
        found.add({"step": step, **line})
    found_in(found)


@pytest.mark.parametrize("begins_again", [True, False])
def test_a_run_that_took_over_another_ones_weights_is_compared_with_its_steps_since(begins_again: bool) -> None:
    own = [{"step": step, "reward/mean": 0.4} for step in range(60)]
    trained: list[dict[str, Any]] = [{"step": step, "entropy": 0.36 if step < 20 else 0.95} for step in range(60)]
    if begins_again:
        trained[20] = {"step": 20, "copied/run": "other", "copied/step": 19}
    for lines in (own + trained, [line for pair in zip(own, trained, strict=True) for line in pair]):
        found = Seen()
        for line in lines:
            found.add(line)
        assert (Sign.ENTROPY in {each.sign for each in found_in(found)}) is not begins_again
        assert [len(found.newest("reward/mean", count)) for count in (39, 40)] == [39, 0 if begins_again else 40]


def test_a_step_that_is_no_number_changes_nothing() -> None:
    found = Seen()
    found.add({"step": "1", "entropy": 1.0})
    found.add({"entropy": 1.0})
    assert not found.names


def test_names_that_somebody_makes_up_are_not_kept() -> None:
    found = Seen(PAID)
    found.add({"step": 1, "reward/mean": 0.5, "environment/math/right/mean": 1.0})
    made_up = {f"environment/math/task_{place}/mean": 1.0 for place in range(10)}
    found.add({"step": 2, **made_up, "reward/math/player/x/mean": 1.0, "reward/math/turn/1/mean": 1.0})
    assert {*found.names} == {"reward/mean", "environment/math/right/mean"}
    found.add({"step": 3, **{f"ess/{place}": 1.0 for place in range(2 * MOST_NAMES)}, "reward/mean": 0.6})
    assert len(found.names) == MOST_NAMES
    assert found.newest("reward/mean", 2) == [0.5, 0.6]


def test_what_is_kept_is_bounded_and_the_same_however_often_a_step_comes() -> None:
    found = seen(NEWEST + 50)
    found.add({"step": 3, "reward/mean": 100.0})
    assert len(found.points("reward/mean")) == NEWEST
    assert found.first("reward/max") == 1.0
    assert "changes" not in found.names
    assert seen(FIRST - 1).first("entropy") is None


def test_a_trend_is_that_of_least_squares() -> None:
    assert trend([1.0, 2.0, 3.0, 4.0]).move == pytest.approx(3.0)
    noisy = trend([0.0, 1.0, 0.0, 1.0])  # slope 0.2, residuals of sum of squares 0.8 over 2 degrees of freedom
    assert noisy.move == pytest.approx(0.6)
    assert noisy.error == pytest.approx(3 * (0.4 / 5) ** 0.5)
    assert trend([2.0, 2.0, 2.0]).certainty == 0.0
