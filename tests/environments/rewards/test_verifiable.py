"""Mathematics, exact text and patterns: the library's verdicts, and hostile text bounded in time and memory."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from math_verify import parse, verify

from counterpoint.environments.rewards.processes import BoundedProcesses, OverLimit, ProcessFailed
from tests.environments.rewards.attempts import score
from tests.environments.rewards.conftest import MakeRubric
from tests.support.growth import assert_growth

DOCUMENTED = [
    (r"${1,3} \cup {2,4}$", r"${1,2,3,4}$"),
    (r"$\frac{1}{2}$", "The answer is $0.5$"),
    ("1/2", r"The answer is $\frac{1}{2}$"),
    ("42", r"So we have \boxed{42}."),
    ("42", r"So we have \boxed{43}."),
    ("$x + 1$", "$1 + x$"),
    ("$x + 1$", "$y + 1$"),
    ("$(1, 2)$", r"$\{1, 2\}$"),
    ("10%", r"$\frac{1}{10}$"),
    ("$1 < x < 2$", "$(1, 2)$"),
    ("0.333333", r"$\frac{1}{3}$"),
    (r"$\sqrt{8}$", r"It is $2\sqrt{2}$"),
    ("3", "I do not know"),
    ("3", ""),
]
"""Expected answers and completions, after the library's documentation and its docstrings."""

HOSTILE = [
    "$" + "(" * 3000 + "1" + ")" * 3000 + "$",
    "$" + "x+" * 100_000 + "1$",
]

MATH = {"kind": "math"}


@pytest.mark.slow
async def test_verdicts_are_those_of_the_library(rubric: MakeRubric) -> None:
    made = rubric(MATH | {"cpu_seconds": 60.0})
    for gold, completion in DOCUMENTED:
        expected = bool(verify(parse(gold), parse(completion)))
        scored = await score(made, completion, gold)
        assert scored.reward == float(expected), (gold, completion)
        assert scored.metrics["math/over_limit"] == 0.0
    assert (await score(made, "3", "3")).metrics["math/found"] == 1.0
    assert (await score(made, "", "3")).metrics["math/found"] == 0.0
    assert (await score(made, r"\boxed{\frac{1}{2}}", r"\frac{1}{2}")).reward == 1.0
    assert (await score(made, r"\boxed{1}", r"\frac{1}{2}")).reward == 0.0
    for nothing in ("", "$"):
        with pytest.raises(ValueError, match=r"part 'math': answer .* of example 0: the expected answer"):
            await score(made, "3", nothing)


@pytest.mark.slow
async def test_exact_text_stands_behind_reasoning(rubric: MakeRubric) -> None:
    whole, found, marked, tagged = (
        rubric({"kind": "exact"} | keys)
        for keys in ({}, {"extract": r"Answer: (\w+)"}, {"extract": r"</think>\s*(\w+)"}, {"extract": r"<think>(\w+)"})
    )
    for made, completion, expected in (
        (whole, "<think>Rome?</think>\nParis", 1.0),
        (whole, "<think>Paris</think>\nRome", 0.0),
        (whole, "<think>Paris", 0.0),
        (found, "<think>Answer: Rome</think>Answer: Paris", 1.0),
        (found, "<think>Answer: Paris</think>I do not know.", 0.0),
        (found, "<think>Answer: Paris", 0.0),
        (marked, "<think>Rome</think> Paris", 1.0),
        (tagged, "<think>Paris</think> Rome", 1.0),
    ):
        assert (await score(made, completion, "Paris")).reward == expected, completion


@pytest.mark.slow
async def test_hostile_mathematics_is_bounded(rubric: MakeRubric) -> None:
    made = rubric(MATH | {"cpu_seconds": 0.5})
    for text in HOSTILE:
        scored = await score(made, text, "3")
        assert scored.metrics == {"total": 0.0, "math": 0.0, "math/over_limit": 1.0}
    with pytest.raises(ValueError, match="cannot be read"):
        await score(made, "3", HOSTILE[0])


@pytest.mark.parametrize(
    ("options", "answer", "completion", "reward"),
    [
        ({}, "Paris", "  Paris\n", 1.0),
        ({}, "Paris", "paris", 0.0),
        ({"ignore_case": True}, "STRASSE", "straße", 1.0),
        ({}, "New York", "New \n York", 1.0),
        ({"collapse_whitespace": False}, "New York", "New  York", 0.0),
        ({"ignore_punctuation": True}, "Its Paris", "It's: Paris!", 1.0),
        ({}, "caf\u00e9", "cafe\u0301", 1.0),
        ({}, "Paris", "Paris is it", 0.0),
    ],
)
async def test_exact(rubric: MakeRubric, options: dict[str, bool], answer: str, completion: str, reward: float) -> None:
    assert (await score(rubric({"kind": "exact", **options}), completion, answer)).reward == reward


@pytest.mark.parametrize("marks", ["\u0301\u0316", "\u0f73"])
def test_endless_marks_do_not_hold_the_loop(rubric: MakeRubric, marks: str) -> None:
    def scored(text: str) -> float:
        return asyncio.run(score(rubric({"kind": "exact"}), text, "a")).reward

    assert scored("a" + marks * 20_000) == 0.0
    assert_growth(lambda size: "a" + marks * size, scored, 4000)


async def test_any_of_several_answers_counts(rubric: MakeRubric) -> None:
    made = rubric({"kind": "exact", "answers_column": "names"})
    assert (await score(made, "UK", names=["Britain", "UK"])).reward == 1.0
    assert (await score(made, "US", names=["Britain", "UK"])).reward == 0.0
    for wrong in ([], "UK", [1], None):
        with pytest.raises(ValueError, match="column 'names' of example 0 is no list of texts"):
            await score(made, "UK", names=wrong)


@pytest.mark.slow
async def test_patterns_are_searched_and_extracted(rubric: MakeRubric) -> None:
    made = rubric(
        {"kind": "regex", "name": "tagged", "pattern": r"(?s)\A<think>.*</think>\s*\S"},
        {"kind": "regex", "name": "clean", "pattern": "damn", "absent": True},
        {"kind": "exact", "extract": r"Answer:\s*(\w+)"},
    )
    names = ("tagged", "clean", "exact")
    scored = await score(made, "<think>Answer: 1\n</think> Answer: 2. Answer:\n3", "3")
    assert [scored.metrics[name] for name in names] == [1, 1, 1]
    scored = await score(made, "damn", "3")
    assert [scored.metrics[name] for name in names] == [0, 0, 0]
    assert scored.metrics["exact/found"] == 0.0


@pytest.mark.slow
async def test_backtracking_is_bounded_and_the_next_text_is_searched(rubric: MakeRubric) -> None:
    made = rubric({"kind": "regex", "pattern": r"(a+)+$", "cpu_seconds": 0.3})
    scored = await score(made, "a" * 64 + "!")
    assert (scored.reward, scored.metrics["regex/over_limit"]) == (0.0, 1.0)
    scored = await score(made, "aaa")
    assert (scored.reward, scored.metrics["regex/over_limit"]) == (1.0, 0.0)


SLOW = {"pattern": r"(a+)+$", "text": "a" * 64 + "!"}
QUICK = {"pattern": "a", "text": "a"}


@pytest.mark.slow
async def test_a_process_has_no_secrets_and_ends_with_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    processes = BoundedProcesses(1)
    assert await processes.run("search", QUICK, cpu_seconds=30, seconds=120) == {"match": "a", "span": [0, 1]}
    (worker,) = processes._idle
    assert "sk-secret" not in Path(f"/proc/{worker.process.pid}/environ").read_text()  # noqa: ASYNC240
    await processes.close()
    with pytest.raises(ProcessLookupError):
        os.kill(worker.process.pid, 0)


@pytest.mark.slow
async def test_a_cancelled_task_does_not_answer_the_next_one() -> None:
    processes = BoundedProcesses(1)
    task = asyncio.create_task(processes.run("search", SLOW, cpu_seconds=60, seconds=120))
    while not processes._slots.locked():  # noqa: ASYNC110
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await processes.run("search", QUICK, cpu_seconds=30, seconds=120) == {"match": "a", "span": [0, 1]}
    task = asyncio.create_task(processes.run("search", SLOW, cpu_seconds=60, seconds=120))
    while processes._idle:  # noqa: ASYNC110
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await processes.run("search", QUICK, cpu_seconds=30, seconds=120) == {"match": "a", "span": [0, 1]}
    await processes.close()


@pytest.mark.slow
async def test_silence_is_the_machines_fault_and_a_limit_the_texts() -> None:
    processes = BoundedProcesses(1)
    with pytest.raises(ProcessFailed, match=r"within 0\.5 s"):
        await processes.run("search", SLOW, cpu_seconds=60, seconds=0.5)
    with pytest.raises(OverLimit, match=r"0\.1 s of processor time"):
        await processes.run("search", SLOW, cpu_seconds=0.1, seconds=120)
    with pytest.raises(ValueError, match="no JSON"):
        await processes.run("search", {"text": object()}, cpu_seconds=1, seconds=1)
    with pytest.raises(ValueError, match="expected at most"):
        await processes.run("search", {"text": "a" * 2**24}, cpu_seconds=1, seconds=1)
    task = asyncio.create_task(processes.run("search", SLOW, cpu_seconds=60, seconds=120))
    while not processes._workers:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await processes.close()
    with pytest.raises(ProcessFailed, match="closed"):
        await task
