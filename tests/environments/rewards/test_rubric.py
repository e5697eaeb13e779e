"""Rubrics: weights, gates, metrics, and what is refused before a run starts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from counterpoint.environments.main_thread import NeedsMainThread
from counterpoint.environments.rewards.base import as_value
from counterpoint.environments.rewards.rubric import Rubric, paid_parts
from tests.environments.rewards import attempts
from tests.environments.rewards.attempts import score
from tests.environments.rewards.conftest import MakeRubric

FUNCTION = {"kind": "function", "path": "tests.environments.rewards.attempts:length"}
PARTS = {"kind": "function", "path": "tests.environments.rewards.attempts:parts", "name": "parts"}
WAITS = {"kind": "function", "path": "tests.environments.rewards.attempts:waits", "name": "waits"}
EXACT = {"kind": "exact"}


async def test_the_reward_is_the_weighted_sum_and_each_part_is_a_metric(rubric: MakeRubric) -> None:
    scored = await score(rubric(EXACT | {"weight": 2.0}, FUNCTION | {"weight": -0.5}), "abcd", "abcd")
    assert scored.reward == pytest.approx(2.0 - 0.2)
    assert scored.metrics == {"total": scored.reward, "exact": 1.0, "function": 0.4}


async def test_a_dictionary_counts_with_its_sum_and_has_a_metric_each(rubric: MakeRubric) -> None:
    scored = await score(rubric(PARTS | {"weight": 0.5}), "abcd", "abcd")
    assert scored.reward == 1.0
    assert scored.metrics == {"total": 1.0, "parts": 2.0, "parts/short": 1.0, "parts/same": 1.0}


async def test_a_part_of_weight_0_is_a_metric_only(rubric: MakeRubric) -> None:
    scored = await score(rubric(EXACT, FUNCTION | {"weight": 0.0}), "abcd", "abcd")
    assert (scored.reward, scored.metrics["function"]) == (1.0, 0.4)


def test_the_parts_that_raise_the_reward_are_those_of_positive_weight() -> None:
    rubric = [EXACT, PARTS | {"weight": 0.5}, WAITS | {"weight": -1.0}, FUNCTION | {"weight": 0}]
    assert paid_parts(rubric) == ("exact", "parts")
    assert paid_parts(["clear", "brief"]) == paid_parts([]) == paid_parts([{"weight": 1.0}]) == ()


async def test_nothing_is_scored_after_a_gate_that_is_not_reached(rubric: MakeRubric) -> None:
    attempts.STARTED.clear()
    scored = await score(rubric(WAITS, EXACT | {"required": 1.0}, FUNCTION | {"required": 0.1}), "abcd", "another")
    assert scored.reward == 0.0
    assert scored.metrics == {"total": 0.0, "exact": 0.0}
    assert attempts.STARTED == []


async def test_a_gate_that_is_reached_counts_as_any_part(rubric: MakeRubric) -> None:
    assert (await score(rubric(FUNCTION, EXACT | {"required": 1.0}), "abcd", "abcd")).reward == pytest.approx(1.4)


async def test_one_failure_cancels_the_other_parts(rubric: MakeRubric) -> None:
    attempts.CANCELLED.clear()
    fails = {"kind": "function", "path": "tests.environments.rewards.attempts:raises", "name": "fails"}
    with pytest.raises(ZeroDivisionError):
        await score(rubric(WAITS, fails), "error")
    assert attempts.CANCELLED == ["error"]


async def test_a_cancelled_score_leaves_no_task(rubric: MakeRubric) -> None:
    attempts.STARTED.clear()
    before = asyncio.all_tasks()
    task = asyncio.create_task(score(rubric(WAITS), "x"))
    while not attempts.STARTED:  # noqa: ASYNC110
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() <= before


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "rubric has 0 parts; expected 1 to 32"),
        (EXACT, "rubric = {'kind': 'exact'}; expected a list of tables"),
        ("exact", "rubric = 'exact'; expected a list of tables"),
        (["exact"], r"rubric = \['exact'\]; expected a list of tables"),
        ([EXACT] * 33, "33 parts"),
        ([EXACT, EXACT], "two parts named 'exact'"),
        ([EXACT | {"name": "total"}], "named 'total'"),
        ([{"kind": "maths"}], r"rubric\[0\].*'maths'"),
        ([EXACT, {"weight": 1.0}], r"rubric\[1\].*kind"),
        ([EXACT | {"wait": 1.0}], r"rubric\[0\]\.wait: unknown key of the kind 'exact'"),
        ([EXACT | {"weight": float("nan")}], r"rubric\[0\]\.weight"),
        ([{"kind": "regex", "pattern": "("}], r"rubric\[0\]\.pattern.*no regular expression"),
        ([EXACT | {"name": "a/b"}], r"rubric\[0\]\.name"),
        ([EXACT | {"name": "a" * 33}], r"rubric\[0\]\.name"),
        ([FUNCTION | {"path": "nowhere"}], "expected package.module:function"),
        ([FUNCTION | {"path": "no_such_module_xyz:f"}], "importing 'no_such_module_xyz' failed.*PYTHONPATH"),
        ([FUNCTION | {"path": "tests.environments.rewards.attempts:lenght"}], "no function 'lenght'"),
        ([FUNCTION | {"path": "tests.environments.rewards.attempts:NOT_A_FUNCTION"}], "no function"),
        ([FUNCTION | {"path": "tests.environments.rewards.attempts:no_reward"}], "example, completion, state"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_at_the_start(parts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        Rubric(parts)


@pytest.mark.parametrize(
    "completion", ["nan", "text", "none", "nothing", "many", "name", "number as name", "inf", "list"]
)
async def test_what_is_no_number_fails(rubric: MakeRubric, completion: str) -> None:
    part = {"kind": "function", "path": "tests.environments.rewards.attempts:garbage", "name": "mine"}
    with pytest.raises((TypeError, ValueError), match=r"part 'mine': tests\.environments\.rewards\.attempts:garbage"):
        await score(rubric(part), completion)


@pytest.mark.parametrize("path", ["raises", "raises_later"])
@pytest.mark.parametrize("completion", ["exit", "interrupt"])
async def test_what_would_end_the_loop_fails_one_rollout(rubric: MakeRubric, path: str, completion: str) -> None:
    part = {"kind": "function", "path": f"tests.environments.rewards.attempts:{path}"}
    with pytest.raises(RuntimeError, match=r"raised (SystemExit|KeyboardInterrupt)"):
        await score(rubric(part), completion)


def test_truth_values_count() -> None:
    assert as_value(True, "it").value == 1.0


@pytest.mark.slow
async def test_a_function_in_a_process_costs_its_own_rollout_only(rubric: MakeRubric) -> None:
    part = {"kind": "function", "path": "tests.environments.rewards.misbehaving:misbehaves", "isolation": "process"}
    made = rubric(part | {"cpu_seconds": 1.0})
    for completion, message in [
        ("memory", "MemoryError"),
        ("exit", "exit code 0"),
        ("killed", "SIGKILL.* twice"),
        ("crash", "SIGSEGV"),
        ("large", "at most 16777216"),
        ("spin", "ended by 1 s of processor time"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            await score(made, completion)
    assert (await score(made, "print")).reward == 0.5  # what it prints is no answer
    assert (await score(made, "well")).reward == 0.5


@pytest.mark.slow
async def test_functions_that_set_alarms_need_a_process(rubric: MakeRubric) -> None:
    """One that hides it, and catches what it gets for it, gives no reward, either."""
    function = {"kind": "function", "path": "tests.environments.rewards.alarms:equal"}
    with pytest.raises(ValueError, match=r"part 'function': .*alarms\.py:\d+. uses math_verify.*isolation"):
        rubric(function)
    made = rubric(function | {"isolation": "process"})
    assert [(await score(made, text, "42")).reward for text in ("42", "43")] == [1.0, 0.0]
    hidden = rubric({"kind": "function", "path": "tests.environments.rewards.attempts:hidden_alarm"})
    with pytest.raises(NeedsMainThread, match="isolation"):
        await score(hidden, "42")


@pytest.mark.parametrize(
    ("parts", "bounds"),
    [
        ([EXACT], (0.0, 1.0)),
        ([EXACT | {"weight": 0.7}, {"kind": "regex", "pattern": "x", "weight": 0.3}], (0.0, 1.0)),
        ([EXACT | {"weight": 2.0}, {"kind": "regex", "pattern": "x", "weight": -0.5}], (-0.5, 2.0)),
        ([EXACT, FUNCTION | {"weight": 0.0}], (0.0, 1.0)),
        ([EXACT, FUNCTION], None),
        ([EXACT | {"weight": 0.0}], None),
        ([{"kind": "code", "style": "stdio"}, EXACT | {"required": 1.0}], (0.0, 2.0)),
        ([{"kind": "judge", "base_url": "http://127.0.0.1:1/v1", "model": "m", "fallback": -1.0}], (-1.0, 1.0)),
    ],
)
def test_bounds_follow_from_kinds_and_weights(rubric: MakeRubric, parts: list[dict[str, Any]], bounds: Any) -> None:
    assert rubric(*parts).reward_bounds == (bounds if bounds is None else pytest.approx(bounds))
