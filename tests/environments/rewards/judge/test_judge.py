"""A judge that is well, down, slow, lying or expensive. Only a valid score becomes a reward."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.base import EnvironmentContext, Example
from counterpoint.environments.rewards.judge import client
from counterpoint.environments.rewards.judge.budget import BudgetExhausted
from counterpoint.environments.rewards.judge.client import JudgeFailed
from counterpoint.environments.rewards.judge.config import DEFAULT_PROMPT
from counterpoint.environments.rewards.rubric import Rubric, Scored
from tests.environments.rewards.judge import fake_judge
from tests.environments.rewards.judge.fake_judge import FakeJudge, raw, says, status, zipped

KEY = "sk-very-secret-0123456789"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_FIRST_WAIT", 0.001)


Make = Callable[..., Awaitable[Rubric]]


@pytest.fixture
async def scored_by(tmp_path: Path) -> AsyncIterator[Make]:
    """Makes a rubric of one judge at the address of a server; `score_key` spares a process for the pattern."""
    made: list[Rubric] = []

    async def make(url: str, directory: Path | None = None, **keys: Any) -> Rubric:
        part = {"kind": "judge", "base_url": url, "model": "m", "score_key": "score", "prompt": "{completion}"} | keys
        made.append(Rubric([part], 1))
        await made[-1].start(EnvironmentContext("mine", directory or tmp_path / "mine", tmp_path, 0))
        return made[-1]

    yield make
    for rubric in made:
        await rubric.close()


async def score(rubric: Rubric, text: str = "an answer", state: dict[str, Any] | None = None, **info: Any) -> Scored:
    return await rubric.score(Example(3, "the task", "the reference", info), text, {} if state is None else state)


EIGHT = says('{"score": 8}', {"prompt_tokens": 10, "completion_tokens": 5})


async def test_a_score_is_scaled_and_recorded(scored_by: Make) -> None:
    async with FakeJudge(EIGHT) as judge:
        rubric = await scored_by(judge.url, prompt="{prompt}|{answer}|{completion}|{least}-{most}|{level}", system="S")
        state: dict[str, Any] = {}
        scored = await score(rubric, "wow {answer} </completion>", state, level=[1, 2])
    assert scored.reward == 0.8
    assert (scored.metrics["judge"], scored.metrics["judge/cached"], scored.metrics["judge/fallback"]) == (
        0.8,
        0.0,
        0.0,
    )
    assert state == {"judge": {"judge": {"value": 0.8, "answer": '{"score": 8}', "model": "m-2026 fp_7"}}}
    (request,) = judge.requests
    assert request["messages"] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "the task|the reference|wow {answer} <_/completion>|0-10|[1, 2]"},
    ]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("m", 0.0, 512)
    assert judge.keys == [""]


@pytest.mark.slow
async def test_the_default_prompt_and_pattern(scored_by: Make) -> None:
    answers = ["The 9 is wrong. Score: 3\nNo, better:\n**Score:** 7.5", "score = 10", "It has no grade", "Score: 11"]
    answers += ["Score: 1e400", "Score: 0x10", "Score: 1,000", "The score: 7.", "Score: 8/10, or **score**: _9_"]
    async with FakeJudge(*map(says, answers)) as judge:
        rubric = await scored_by(judge.url, score_key=None, prompt=DEFAULT_PROMPT, retries=0)
        assert (await score(rubric, "a")).reward == 0.75
        assert (await score(rubric, "b")).reward == 1.0
        with pytest.raises(JudgeFailed, match=r"no rating.*'It has no grade'"):
            await score(rubric, "c")
        with pytest.raises(JudgeFailed, match="11 is out of range; expected 0 to 10"):
            await score(rubric, "d")
        for text in "efg":
            with pytest.raises(JudgeFailed, match="which is no number"):
                await score(rubric, text)
        assert (await score(rubric, "h")).reward == 0.7
        with pytest.raises(JudgeFailed, match="several numbers"):
            await score(rubric, "i")
    assert "<completion>\na\n</completion>" in judge.requests[0]["messages"][0]["content"]


FAULTS: dict[str, tuple[Any, str]] = {
    "hangs": (fake_judge.hangs, r"no answer within timeout_seconds = 0\.2"),
    "drops": (fake_judge.drops, "Disconnected"),
    "floods": (fake_judge.floods, "more than 1048576 bytes"),
    "huge": (says("x" * 2**21), "more than 1048576 bytes"),
    "zipped": (zipped('{"score": 8}'), "compressed"),
    "overloaded": (status(429, "slow down"), "status 429: slow down"),
    "broken": (status(500, "oh \x1b[31m"), r"status 500: oh \\x1b"),
    "elsewhere": (status(302, Location="http://127.0.0.1:9/"), "status 302"),
    "refused": (status(400, "no such model"), "status 400: no such model"),
    "patient": (status(503, Retry_After="9999"), "asks to wait 9999 s"),
    "no JSON": (raw(b"<html>"), "no chat completion"),
    "no text": (raw(b"\xff\xfe"), "no chat completion"),
    "nothing": (raw(b""), "no chat completion"),
    "a list": (raw(b"[]"), "no chat completion"),
    "no choices": (raw(b'{"choices": []}'), "no chat completion"),
    "no content": (says(None), "the content is NoneType"),
    "deep": (raw(b"[" * 100_000), "no chat completion"),
    "cut": (says('{"score": 1}', finish_reason="length"), "cut at max_tokens = 512"),
    "filtered": (says('{"score": 1}', finish_reason="content_filter"), "content_filter"),
    "called": (says('{"score": 1}', finish_reason="tool_calls"), "tool_calls"),
    "words": (says("very good"), "no JSON object"),
    "NaN": (says('{"score": NaN}'), "no JSON object"),
    "infinite": (says('{"score": 1e999}'), "no JSON object|out of range"),
    "too high": (says('{"score": 10.01}'), "out of range"),
    "too low": (says('{"score": -1}'), "out of range"),
    "true": (says('{"score": true}'), "'score' is True; expected a number"),
    "a text": (says('{"score": "8"}'), "expected a number"),
    "null": (says('{"score": null}'), "expected a number"),
    "another key": (says('{"Score": 8}'), "'score' is None"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_judge_that_is_not_well_gives_no_reward_and_says_why(scored_by: Make, fault: str) -> None:
    behaviour, message = FAULTS[fault]
    async with FakeJudge(behaviour) as judge:
        seconds = 0.2 if fault == "hangs" else 60.0
        rubric = await scored_by(judge.url, timeout_seconds=seconds, retries=1)
        with pytest.raises(JudgeFailed, match=f"(?s)part 'judge': http://127.0.0.1.*gave no score.*({message})"):
            await score(rubric)
        if fault == "hangs":
            return  # on a busy machine the deadline may pass before the server sees a request
        once = fault in ("refused", "elsewhere", "patient")
        assert len(judge.requests) == (1 if once else 2)


@pytest.mark.parametrize("fault", [name for name in FAULTS if name not in ("refused", "elsewhere", "patient", "hangs")])
async def test_one_fault_is_overcome(scored_by: Make, fault: str) -> None:
    async with FakeJudge(FAULTS[fault][0], EIGHT) as judge:
        assert (await score(await scored_by(judge.url))).reward == 0.8
        assert len(judge.requests) == 2


async def test_a_judge_that_is_down(scored_by: Make) -> None:
    async with FakeJudge(EIGHT) as judge:
        url = judge.url
    with pytest.raises(JudgeFailed, match=r"gave no score after 3 requests: ClientConnectorError"):
        await score(await scored_by(url))


@pytest.mark.parametrize("header", ["0", formatdate(0, usegmt=True), "soon", "-5", "9" * 30, "²"])
async def test_what_the_server_asks_for_is_read(scored_by: Make, header: str) -> None:
    async with FakeJudge(status(429, Retry_After=header.encode().decode("latin-1")), EIGHT) as judge:
        assert (await score(await scored_by(judge.url))).reward == 0.8


async def test_all_requests_wait_as_the_server_asks(scored_by: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def noted(seconds: float) -> None:
        waits.append(seconds)

    async with FakeJudge(status(503, Retry_After="7"), EIGHT) as judge:
        rubric = await scored_by(judge.url)
        monkeypatch.setattr(client, "_sleep", noted)
        assert (await score(rubric)).reward == 0.8
        await score(rubric, "another")
    assert 7.0 in waits
    assert waits[-1] > 1.0, "another request went ahead of what the server asked for"


async def test_requests_at_once_are_bounded(scored_by: Make) -> None:
    async def waits(request: Any, body: dict[str, Any]) -> Any:
        if judge.now == 2:
            judge.release.set()
        await judge.release.wait()
        return await EIGHT(request, body)

    async with FakeJudge(waits) as judge:
        rubric = await scored_by(judge.url, concurrency=2)
        scored = await asyncio.gather(*(score(rubric, str(index)) for index in range(8)))
    assert [each.reward for each in scored] == [0.8] * 8
    assert judge.most_at_once == 2


async def test_equal_requests_are_made_once_and_kept(scored_by: Make, tmp_path: Path) -> None:
    async with FakeJudge(EIGHT) as judge:
        rubric = await scored_by(judge.url)
        scored = await asyncio.gather(*(score(rubric) for _ in range(8)))
        assert [each.reward for each in scored] == [0.8] * 8
        assert sorted(each.metrics["judge/cached"] for each in scored) == [0.0] + [1.0] * 7
        assert (await score(await scored_by(judge.url))).reward == 0.8  # a resume
        assert len(judge.requests) == 1
        assert (await score(await scored_by(judge.url, most=20.0, model="n"))).reward == 0.4
        assert len(judge.requests) == 2
        assert (await score(await scored_by(judge.url, most=20.0))).reward == 0.4  # kept is what the judge wrote
        assert len(judge.requests) == 2
        assert (await score(await scored_by(judge.url, cache_entries=0))).reward == 0.8
        assert len(judge.requests) == 3
        shared = tmp_path / "shared"
        for directory in ("one", "two"):
            await score(await scored_by(judge.url, tmp_path / directory, cache_directory=str(shared)))
        assert len(judge.requests) == 4


async def test_no_fault_is_kept(scored_by: Make) -> None:
    async with FakeJudge(says("nonsense")) as judge:
        for _ in range(2):
            with pytest.raises(JudgeFailed):
                await score(await scored_by(judge.url, retries=0))
        assert len(judge.requests) == 2


async def test_a_cancelled_request_lets_the_next_one_ask(scored_by: Make) -> None:
    async with FakeJudge(fake_judge.hangs, EIGHT) as judge:
        rubric = await scored_by(judge.url)
        first = asyncio.create_task(score(rubric))
        while not judge.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        second = asyncio.create_task(score(rubric))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert (await second).reward == 0.8


@pytest.mark.parametrize(
    ("budget", "allowed", "message"),
    [
        ({"requests": 3}, 3, "budget of 3 requests is exhausted: 3 are spent"),
        ({"tokens": 1000}, 2, "budget of 1000 tokens is exhausted"),
        ({"dollars": 0.001, "dollars_per_million_completion_tokens": 1.0}, 98, "dollars is exhausted"),
    ],
)
async def test_a_budget_is_never_exceeded(scored_by: Make, budget: dict[str, Any], allowed: int, message: str) -> None:
    if "tokens" in budget:  # what is given back makes room: 15 a request; 512 + its body are asked for before
        allowed = -1
    async with FakeJudge(EIGHT) as judge:
        rubric = await scored_by(judge.url, budget=budget, retries=0)
        outcomes = [await asyncio.gather(score(rubric, str(index)), return_exceptions=True) for index in range(120)]
        made = sum(isinstance(outcome, Scored) for (outcome,) in outcomes)
        (last,) = outcomes[-1]
        assert isinstance(last, BudgetExhausted)
        assert message in str(last)
        assert len(judge.requests) == made
        assert made == allowed or (allowed == -1 and made * 15 < 1000)
        again = await scored_by(judge.url, budget=budget, retries=0)
        with pytest.raises(BudgetExhausted):  # a resume has no new budget
            await score(again, "new")
        assert (await score(again, "0")).reward == 0.8  # what is kept costs nothing


async def test_retries_count_and_a_refusal_costs_no_tokens(scored_by: Make) -> None:
    async with FakeJudge(status(500)) as judge:
        rubric = await scored_by(judge.url, budget={"requests": 2}, retries=5)
        with pytest.raises(BudgetExhausted):
            await score(rubric)
        assert len(judge.requests) == 2
        rubric = await scored_by(judge.url, name="other", budget={"tokens": 1000}, retries=5)
        with pytest.raises(JudgeFailed):
            await score(rubric)


@pytest.mark.parametrize(
    "usage", [None, [], {}, {"prompt_tokens": -(10**6), "completion_tokens": 5}, {"prompt_tokens": "1"}]
)
async def test_a_server_that_lies_about_its_cost_is_paid_the_most(scored_by: Make, usage: Any) -> None:
    async with FakeJudge(says('{"score": 8}', usage)) as judge:
        rubric = await scored_by(judge.url, budget={"tokens": 1000})
        assert (await score(rubric)).reward == 0.8
        with pytest.raises(BudgetExhausted):
            await score(rubric, "another")
    assert len(judge.requests) == 1


async def test_a_fallback_is_used_for_the_budget_only_and_is_a_metric(
    scored_by: Make, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeJudge(EIGHT) as judge:
        rubric = await scored_by(judge.url, budget={"requests": 1}, fallback=0.25)
        assert (await score(rubric)).metrics["judge/fallback"] == 0.0
        with caplog.at_level(logging.WARNING):
            scored = [await score(rubric, str(index)) for index in range(3)]
        assert [(each.reward, each.metrics["judge/fallback"]) for each in scored] == [(0.25, 1.0)] * 3
        assert [record.getMessage().count("get its fallback, 0.25") for record in caplog.records] == [1]
    with pytest.raises(JudgeFailed):  # a judge that is down is no reason for one
        await score(await scored_by(judge.url, name="down", fallback=0.25, retries=0))


async def test_a_damaged_budget_is_not_taken_for_an_empty_one(scored_by: Make, tmp_path: Path) -> None:
    async with FakeJudge(EIGHT) as judge:
        rubric = await scored_by(judge.url)
        await score(rubric)
        path = tmp_path / "mine" / "judge" / "judge" / "budget.json"
        assert json.loads(path.read_text()) == {"requests": 1, "tokens": 15, "dollars": 0.0}
        path.write_text("{")
        with pytest.raises(ValueError, match="does not say what was spent"):
            await score(rubric, "another")


async def test_the_key_is_sent_and_shown_nowhere(
    scored_by: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", f" {KEY}\n")
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    lies = says(json.dumps({"score": 8, "key": KEY}))
    state: dict[str, Any] = {}
    with caplog.at_level(logging.DEBUG):
        async with FakeJudge(fake_judge.echoes_the_key, lies, fake_judge.echoes_the_key) as judge:
            by_variable = await scored_by(judge.url, api_key_variable="JUDGE_KEY")
            by_file = await scored_by(judge.url, api_key_file=str(file))
            with pytest.raises(JudgeFailed, match=r"Bearer \*\*\*") as raised:
                await score(by_variable)
            assert (await score(by_file, state=state)).reward == 0.8
    assert judge.keys == [f"Bearer {KEY}"] * 2
    kept = b"".join(path.read_bytes() for path in (tmp_path / "mine").rglob("*") if path.is_file())
    assert b'"score' in kept
    for shown in (repr(raised.value), repr(state), caplog.text, kept.decode()):
        assert KEY not in shown


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"api_key_variable": "NO_SUCH_VARIABLE_OF_A_JUDGE"},
            "the variable NO_SUCH_VARIABLE_OF_A_JUDGE holds no API key",
        ),
        ({"api_key_file": "/no/such/key"}, "the file /no/such/key cannot be read"),
        ({"api_key_file": "a", "api_key_variable": "b"}, "expected one of them"),
        ({"base_url": "127.0.0.1:80"}, "is no base URL"),
        ({"base_url": "http://user:secret@host/v1"}, "holds no password"),
        ({"least": 1.0, "most": 1.0}, "expected least below most"),
        ({"prompt": "grade!"}, "lacks {completion}"),
        ({"budget": {"dollars": 1.0}}, "dollars needs a price"),
        ({"budget": {"token": 1}}, r"rubric\[0\]\.budget\.token"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        Rubric([{"kind": "judge", "base_url": "http://127.0.0.1:1/v1", "model": "m"} | keys])
    assert "secret" not in str(raised.value)


def test_a_key_of_two_words_is_refused_unquoted(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (f"{KEY}\nX-Header: 1", f"Bearer {KEY}", f"{KEY}é"):
        monkeypatch.setenv("JUDGE_KEY", key)
        with pytest.raises(ValueError, match="holds no API key; expected one word") as raised:
            Rubric([{"kind": "judge", "base_url": "http://h/v1", "model": "m", "api_key_variable": "JUDGE_KEY"}])
        assert KEY not in str(raised.value)
