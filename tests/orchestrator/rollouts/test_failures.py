"""Failures by kind: none hides another."""

from __future__ import annotations

import logging

import pytest

from counterpoint.orchestrator.rollouts.failures import (
    MAX_KINDS,
    NO_TURN,
    cause_of,
    count_failures,
    failures_in_words,
    kind_of,
    lasting_failure,
    most_frequent,
    sum_failures,
)
from counterpoint.orchestrator.scheduling.giving_up import Lasting
from counterpoint.orchestrator.step.discarded import DiscardedRollouts
from counterpoint.orchestrator.step.step_metrics import additive_metrics
from counterpoint.run.config import ScheduleConfig
from counterpoint.transport.records import Rollout
from tests.support.rollouts import make_rollout


def failed(error: str, environment: str = "reverse") -> Rollout:
    rollout = make_rollout(turns=[])
    rollout.error, rollout.environment = error, environment
    return rollout


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("KeyError: 'x' (in score, /a/b.py:3)", "KeyError"),
        ("aiohttp.ClientError: no (in f, x:1)", "aiohttp.ClientError"),
        ("the reward is nan; expected a finite number", "the reward is nan"),
        ("turn 12: prompt_ids is empty; expected at least one token", "turn N: prompt_ids is empty"),
        (
            "missed its deadline of rollout_timeout_seconds = 2.5",
            "missed its deadline of rollout_timeout_seconds = 2.5",
        ),
        ("rows 3 to 5: row_limit = 1e-3 of 7", "rows N to N: row_limit = 1e-3 of N"),
        ("the reward is '0.7'; expected a number", "the reward is '...'"),
    ],
)
def test_a_kind_is_what_does_not_differ_from_rollout_to_rollout(error: str, kind: str) -> None:
    assert kind_of(error) == kind


def test_failures_are_counted_by_environment_and_kind() -> None:
    nan, missing = failed("the reward is nan; expected a finite number"), failed("KeyError: 'x' (in f, x:1)")
    metrics = additive_metrics([nan] * 112 + [missing] * 75 + [failed("KeyError: 1", "other")])
    assert metrics["rollouts/failed"] == 188
    assert metrics["failures/reverse/the reward is nan"] == 112
    assert metrics["failures/reverse/KeyError"] == 75
    assert most_frequent({}) == ""
    totals = sum_failures([metrics, {"failures/other/KeyError": 4}])
    assert most_frequent(totals) == "the reward is nan (in reverse)"
    assert totals == {"reverse": {"the reward is nan": 112, "KeyError": 75}, "other": {"KeyError": 5}}
    assert failures_in_words(totals) == "112 the reward is nan, 75 KeyError (in reverse); 5 KeyError (in other)"


def test_what_inference_failed_counts_for_no_environment() -> None:
    unanswered = failed("InferenceError: no answer after 4 attempts")
    unanswered.inference_failed = True
    metrics = additive_metrics([unanswered] * 3 + [failed("KeyError: 'x'"), make_rollout()])
    assert (metrics["rollouts/failed"], metrics["rollouts/inference_failed"], metrics["rollouts/completed"]) == (
        1,
        3,
        1,
    )
    assert sum_failures([metrics]) == {"reverse": {"KeyError": 1}}


def test_kinds_without_number_are_counted_together() -> None:
    metrics = count_failures([failed(f"Error{chr(65 + n // 26)}{chr(65 + n % 26)}: x") for n in range(200)])
    assert len(metrics) == MAX_KINDS + 1
    assert sum(metrics.values()) == 200


def test_a_rare_failure_is_logged_beside_a_frequent_one(caplog: pytest.LogCaptureFixture) -> None:
    discarded = DiscardedRollouts(ScheduleConfig(), clock=lambda: 0.0)
    caplog.set_level(logging.WARNING)
    for _ in range(1000):
        discarded.rollout_failed("KeyError: 'x'")
    discarded.rollout_failed("ZeroDivisionError: division by zero")
    assert sum("KeyError: 'x'" in line for line in caplog.text.splitlines()) == 1
    assert "rollout failed: ZeroDivisionError" in caplog.text


def test_a_cause_is_the_kind_and_the_place() -> None:
    assert cause_of("KeyError: 'a' (in score, my.py:3)") == cause_of("KeyError: 'b' (in score, my.py:3)")
    assert cause_of("KeyError: 'a' (in score, my.py:3)") != cause_of("KeyError: 'a' (in score, my.py:4)")
    assert cause_of("the reward is nan") == cause_of("the reward is nan")


@pytest.mark.parametrize(
    ("errors", "lasting"),
    [
        (["KeyError: 'x' (in score, my.py:3)"] * 2, Lasting.CODE),
        (["RequestRefused: http://one answered 400: too long (in rollout, my.py:3)"] * 2, Lasting.REFUSED),
        (["AgentRefused: the agent ended (in f, g.py:1)", "TypeError: x (in f, g.py:1)"], Lasting.CODE),
        (["NoReward: score returned None (NoneType); expected a number (in score, my.py:3)"] * 2, Lasting.CODE),
        ([f"{NO_TURN}; expected at least one model call"] * 2, Lasting.CODE),
        (["StateError: the environment left a state that is not JSON-serialisable: x"] * 2, Lasting.CODE),
        (["KeyError: 'x' (in score, my.py:3)", "ConnectionError: down (in score, my.py:2)"], None),
        (["RuntimeError: the sandbox is down (in score, my.py:2)"] * 2, None),
        (["JSONDecodeError: Expecting value (in score, my.py:2)"] * 2, None),
        (["missed its deadline of rollout_timeout_seconds = 3"] * 2, None),
        (["its worker 1 died: signal 9 (SIGKILL)"] * 2, None),
    ],
)
def test_only_what_cannot_pass_by_itself_lasts(errors: list[str], lasting: Lasting | None) -> None:
    failure = lasting_failure([failed(error) for error in errors])
    assert (failure and failure.lasting) == lasting
    assert failure is None or failure.error == errors[0]


def test_a_refusal_after_answered_turns_has_to_last_as_errors_of_code_do() -> None:
    groups = [
        [failed("RequestRefused: http://one answered 400: too long (in rollout, my.py:3)") for _ in range(2)]
        for _ in "ab"
    ]
    groups[1][1].turns = make_rollout().turns
    found = [failure.lasting for group in groups if (failure := lasting_failure(group)) is not None]
    assert found == [Lasting.REFUSED, Lasting.CODE]


def test_what_got_no_answer_does_not_last() -> None:
    unanswered = failed("InferenceError: no answer after 4 attempts")
    unanswered.inference_failed = True
    assert lasting_failure([unanswered] * 2) is None
    assert lasting_failure([unanswered, failed("KeyError: 'x' (in score, my.py:3)")]) is not None


def test_a_long_kind_ends_after_a_word() -> None:
    kind = kind_of(
        "the judge answered with a text that has none of the marks between which its verdict has to stand, at all"
    )
    assert kind == "the judge answered with a text that has none of the marks between which its…"
    assert kind_of("x" * 200) == "x" * 79 + "…"
