"""A rollout: turns are recorded, only the missing routing is asked for, and whatever an environment does costs one rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import Any, cast

import numpy as np
import orjson
import pytest

from counterpoint.environments.base import Reply
from counterpoint.environments.chat import Chat
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.sampling import CallOverrides, SamplingOverrides
from counterpoint.inference.base import InferenceError, ParsedText, RequestRefused, SamplingParameters
from counterpoint.orchestrator.rollouts import play as play_module
from counterpoint.orchestrator.rollouts.play import LoadedEnvironment, PolicyModel, play, score_group
from counterpoint.orchestrator.rollouts.rollout_file import rollout_buffers
from counterpoint.orchestrator.step.records import rollout_record
from counterpoint.transport.records import Int32Array, Rollout, Turn
from tests.orchestrator.toy_environment import Toy, Unusual
from tests.support.rollouts import make_rollout, make_turn

NO_CHAT = cast(Chat, None)
SAMPLING = SamplingParameters(temperature=1.0, max_tokens=8, stop_token_ids=(1,))


class CountingPool:
    """Completes every prompt with two tokens, and remembers from which row routing was asked for."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.samplings: list[SamplingParameters] = []

    async def generate(
        self, prompt_ids: Int32Array, sampling: SamplingParameters, *, affinity: str, routed_experts_start: int = 0
    ) -> Turn:
        self.starts.append(routed_experts_start)
        self.samplings.append(sampling)
        return make_turn(prompt_ids.tolist(), [100 + len(self.starts), 1], start=routed_experts_start)


def make_model() -> tuple[PolicyModel, CountingPool, Rollout]:
    pool, rollout = CountingPool(), make_rollout(turns=[], reward=None)
    return PolicyModel(rollout, NO_CHAT, pool, SAMPLING), pool, rollout


async def test_only_the_routing_that_is_missing_is_asked_for() -> None:
    model, pool, rollout = make_model()
    turn = await model.generate([1, 2, 3])
    tokens = [1, 2, 3, *turn.completion_ids.tolist()]
    await model.generate([*tokens, 4])
    await model.generate([9, 9])
    await model.generate([*tokens, 7])
    assert pool.starts == [0, len(tokens) - 1, 0, 0]
    assert len(rollout.turns) == 4


async def test_a_call_may_be_sampled_otherwise() -> None:
    model, pool, _ = make_model()
    await model.generate([1, 2], SamplingOverrides(max_tokens=3, stop=["x"]))
    await model.generate([1, 2])
    assert pool.samplings == [SAMPLING.replaced(max_tokens=3, stop=("x",)), SAMPLING]


async def test_a_constrained_call_is_sampled_by_its_schema_and_not_trained() -> None:
    model, pool, _ = make_model()
    turn = await model.generate([1, 2], CallOverrides(json_schema="{}"))
    free = await model.generate([1, 2], CallOverrides(max_tokens=3))
    assert [each.json_schema for each in pool.samplings] == ["{}", ""]
    assert (turn.trained_tokens, free.trained_tokens) == (0, len(free.completion_ids))


async def test_an_environment_sees_how_its_calls_are_sampled() -> None:
    sampling = make_model()[0].sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.stop) == (1.0, 8, [])


class ParsingCounter(CountingPool):
    """Finds a call of `add` in every completion, and remembers what it was asked."""

    parses_reasoning = False

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []
        self.parsed = ParsedText("I add.", "", (("add", '{"a": 1}'), ("add", '{"a": 2}')))

    async def parse(
        self,
        token_ids: list[int],
        tools: Sequence[Any],
        template_kwargs: dict[str, Any],
        *,
        cut: bool,
        server: str | None,
    ) -> ParsedText:
        self.asked.append((token_ids, template_kwargs, cut, server))
        return self.parsed


async def test_calls_of_tools_are_parsed_by_the_pool_and_get_ids() -> None:
    class EndedByOne:
        stop_token_ids = (1,)
        template_kwargs = {"enable_thinking": False}

    pool, rollout = ParsingCounter(), make_rollout(turns=[], reward=None)
    model = PolicyModel(rollout, cast(Chat, EndedByOne()), pool, SAMPLING)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"required": ["a"]}}}]
    turn = await model.generate([1, 2])
    reply = await model.parse(turn, tools)
    assert [(call.id, call.name, call.arguments) for call in reply.calls] == [
        ("call_1", "add", {"a": 1}),
        ("call_2", "add", {"a": 2}),
    ]
    assert [call.id for call in (await model.parse(turn, tools)).calls] == ["call_3", "call_4"]
    assert pool.asked[0] == ([101], {"enable_thinking": False}, False, turn.server)
    strict = [{"type": "function", "function": {"name": "add", "parameters": {"required": ["b"]}}}]
    said = 'add: arguments: "b" is a required property'
    assert (await model.parse(turn, strict)).malformed == f"{said}\n{said}"
    assert turn.completion_ids.tolist() == [101, 1]


async def test_a_turn_that_was_cut_has_the_calls_that_were_complete_and_the_model_is_told() -> None:
    class EndedByNine:
        stop_token_ids = (9,)
        template_kwargs: dict[str, Any] = {}

    pool = ParsingCounter()
    model = PolicyModel(make_rollout(turns=[], reward=None), cast(Chat, EndedByNine()), pool, SAMPLING)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"required": ["a"]}}}]
    turn = await model.generate([1, 2])

    async def parsed(reason: str, found: ParsedText) -> Reply:
        pool.parsed = found
        return await model.parse(replace(turn, finish_reason=reason), tools)

    calls = (("add", '{"a": 1}'),)
    cut = await parsed("length", ParsedText("", "", calls, "a call was begun"))
    assert pool.asked[-1] == ([101, 1], {}, True, turn.server)
    assert (len(cut.calls), "limit of 2 tokens; only" in cut.malformed) == (1, True)
    assert "limit of 2 tokens; only" in (await parsed("length", ParsedText("", "", calls))).malformed
    none = await parsed("length", ParsedText("", "", (), "a call was begun"))
    assert (none.calls, none.malformed.split("\n")[0], "no call was" in none.malformed) == (
        (),
        "a call was begun",
        True,
    )
    wrong = await parsed("length", ParsedText("", "", (("add", "{}"),), "a call was begun"))
    said = 'add: arguments: "a" is a required property'
    assert (wrong.calls, wrong.malformed.split("\n")[0]) == ((), said)
    # An answer without a call, and calls that a stop string ended as it was meant to.
    assert await parsed("length", ParsedText("text")) == Reply("text")
    assert not (await parsed("stop", ParsedText("", "", calls))).malformed
    assert "a stop string" in (await parsed("stop", ParsedText("", "", calls, "a call was begun"))).malformed


@pytest.mark.parametrize("prompt", [[], [[1, 2]]])
async def test_a_prompt_that_is_none(prompt: Any) -> None:
    model, pool, _ = make_model()
    with pytest.raises(ValueError, match="flat, non-empty"):
        await model.generate(prompt)
    assert pool.starts == []


class Scripted(Toy):
    """Calls no model; does what its argument says."""

    def __init__(self, outcome: Any, seconds: float = 0.0) -> None:
        super().__init__()
        self._outcome, self._seconds = outcome, seconds

    async def rollout(self, example: Any, model: Any, state: dict[str, Any]) -> None:
        await asyncio.sleep(self._seconds)
        if isinstance(self._outcome, BaseException):
            raise self._outcome

    async def score(self, example: Any, rollout: Rollout) -> float:
        return cast(float, self._outcome)

    async def score_group(self, example: Any, rollouts: Any) -> Any:
        return self._outcome


def load(environment: Toy, seconds: float = 30.0) -> LoadedEnvironment:
    return LoadedEnvironment(EnvironmentConfig(name="toy", kind="unused", rollout_timeout_seconds=seconds), environment)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise KeyError("text")


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (KeyError("x"), "KeyError"),
        (InferenceError("no answer"), "no answer"),
        (TimeoutError("its own"), "TimeoutError: its own"),
        (SystemExit(1), "SystemExit"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (GeneratorExit(), "GeneratorExit"),
        (Unusual("no exception"), "Unusual: no exception"),
        (asyncio.CancelledError(), "cancelled itself"),
        (ValueError("x" * 10_000 + " for that"), "x for that (in rollout, "),
        (OSError("no file 'caf\udce9'"), "no file 'caf\\udce9'"),
        (Unspeakable(), "Unspeakable: (its text cannot be had: KeyError) (in rollout, "),
        ("0.7", "returned '0.7' (str); expected a number"),
        ([0.7], "returned [0.7] (list); expected a number"),
        (np.array(0.7), "(ndarray); expected a number"),
        (None, f"may lack a `return` (in score, {__file__}:"),
        ("x" * 10_000, "(str); expected a number"),
        (10**400, "(int); expected a finite number (in score, "),
        (float("nan"), "NoReward: score returned nan (float); expected a finite number (in score, "),
        ({"white": 1.0, "black": np.float32("inf")}, "(float32) for player 'black'; expected a finite number"),
    ],
)
async def test_what_an_environment_raises_becomes_an_error(outcome: Any, said: str) -> None:
    model, _, rollout = make_model()
    await play(load(Scripted(outcome)), rollout, model)
    assert rollout.error is not None
    assert said in rollout.error
    assert len(rollout.error) < 2100
    orjson.dumps(rollout_record(rollout, []))
    rollout_buffers(rollout)


@pytest.mark.parametrize("reward", [0.5, 1, np.float32(0.5), np.int64(1), True, np.bool_(True), Fraction(1, 2)])
async def test_a_reward_is_any_real_number(reward: Any) -> None:
    model, _, rollout = make_model()
    await play(load(Scripted(reward)), rollout, model)
    assert rollout.error is None
    assert type(rollout.reward) is float
    assert rollout.reward == float(reward)


async def test_a_reward_outside_its_bounds_fails_its_rollout() -> None:
    config = EnvironmentConfig.model_validate({"name": "toy", "kind": "unused", "reward_bounds": [0, 1]})
    for outcome, said in ((1.0, None), (2.0, "environment 'toy': the reward is 2.0, and its reward_bounds are [0, 1]")):
        model, _, rollout = make_model()
        await play(LoadedEnvironment(config, Scripted(outcome)), rollout, model)
        assert rollout.reward == (None if said else outcome)
        assert said in rollout.error if said and rollout.error else rollout.error == said


async def test_the_deadline() -> None:
    model, _, rollout = make_model()
    await play(load(Scripted(1.0, seconds=3600), seconds=0.01), rollout, model)
    assert rollout.error == "missed its deadline of rollout_timeout_seconds = 0.01"


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_rollout_that_ignores_its_cancellation_is_given_up(
    cancelled: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(play_module, "_CANCELLING_SECONDS", 0.01)
    released = asyncio.Event()

    class Stubborn(Scripted):
        async def rollout(self, example: Any, model: Any, state: Any) -> None:
            while not released.is_set():
                try:
                    await released.wait()
                except:  # noqa: E722 - as many loops that try again have it
                    await asyncio.sleep(0)

    model, _, rollout = make_model()
    playing = asyncio.create_task(play(load(Stubborn(1.0), seconds=3600 if cancelled else 0.01), rollout, model))
    async with asyncio.timeout(60):
        if cancelled:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing
        else:
            await playing
            assert (
                rollout.error == "missed its deadline of rollout_timeout_seconds = 0.01, and ignores its cancellation"
            )
        assert "ignores its cancellation, and goes on beside the run" in caplog.text
        (left,) = play_module._given_up
        released.set()
        await left
    assert not play_module._given_up


class UnansweringPool(CountingPool):
    """Raises an error for every call, or lets it wait for ever."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error

    async def generate(self, *_arguments: Any, **_keywords: Any) -> Turn:
        if self.error is None:
            await asyncio.Event().wait()
        raise self.error or AssertionError


class Calling(Toy):
    """Calls the model; an error becomes one of its own, as behind a client library."""

    async def rollout(self, example: Any, model: Any, state: dict[str, Any]) -> None:
        try:
            await model.generate([1, 2, 3])
        except InferenceError:
            raise RuntimeError("the client library gave up") from None
        raise KeyError("its own")


@pytest.mark.parametrize(
    ("pool", "seconds", "is_inferences"),
    [
        (UnansweringPool(InferenceError("no answer after 4 attempts")), 30.0, True),
        (UnansweringPool(None), 0.05, True),
        (UnansweringPool(RequestRefused("the prompt is too long")), 30.0, False),
        (CountingPool(), 30.0, False),
    ],
)
async def test_a_call_without_an_answer_is_no_failure_of_the_environment(
    pool: CountingPool, seconds: float, is_inferences: bool
) -> None:
    rollout = make_rollout(turns=[], reward=None)
    await play(load(Calling(), seconds), rollout, PolicyModel(rollout, NO_CHAT, pool, SAMPLING))
    assert rollout.error is not None
    assert rollout.inference_failed == is_inferences


async def test_an_unanswered_call_that_a_later_one_made_up_for_excuses_no_environment() -> None:
    class Flaky(CountingPool):
        failed = False

        async def generate(self, *arguments: Any, **keywords: Any) -> Turn:
            if not self.failed:
                self.failed = True
                raise InferenceError("no answer after 4 attempts")
            return await super().generate(*arguments, **keywords)

    class Retrying(Toy):
        async def rollout(self, example: Any, model: Any, state: dict[str, Any]) -> None:
            with suppress(InferenceError):
                await model.generate([1, 2, 3])
            await model.generate([1, 2, 3])
            raise KeyError("its own")

    rollout = make_rollout(turns=[], reward=None)
    await play(load(Retrying(), 30.0), rollout, PolicyModel(rollout, NO_CHAT, Flaky(), SAMPLING))
    assert rollout.error is not None
    assert not rollout.inference_failed


async def test_a_rollout_takes_no_turn_after_its_end() -> None:
    class GatedPool(CountingPool):
        gate = asyncio.Event()

        async def generate(self, *arguments: Any, **keywords: Any) -> Turn:
            await self.gate.wait()
            return await super().generate(*arguments, **keywords)

    pool, rollout = GatedPool(), make_rollout(turns=[], reward=None)
    model = PolicyModel(rollout, NO_CHAT, pool, SAMPLING)
    late = asyncio.create_task(model.generate([1, 2]))
    await play(load(Scripted(1.0)), rollout, model)
    pool.gate.set()
    with pytest.raises(RuntimeError, match="0-0 has ended"):
        await late
    with pytest.raises(RuntimeError, match="0-0 has ended"):
        await model.generate([3])
    assert (rollout.turns, rollout.branches) == ([], ())


async def test_a_cancellation_from_outside_goes_through() -> None:
    model, _, rollout = make_model()
    task = asyncio.create_task(play(load(Scripted(1.0, seconds=3600)), rollout, model))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_group_is_scored_as_one_or_fails_as_one() -> None:
    rollouts = [make_rollout(0, index, reward=None) for index in range(2)]
    await score_group(load(Scripted(np.array([0.25, 0.75]))), rollouts)
    assert [rollout.reward for rollout in rollouts] == [0.25, 0.75]
    await score_group(load(Scripted([1.0])), rollouts)
    assert all("1 rewards for 2 rollouts" in (rollout.error or "") for rollout in rollouts)
    rollouts = [make_rollout(0, index, reward=None) for index in range(2)]
    await score_group(load(Scripted([0.25, "0.75"])), rollouts)
    assert all("returned '0.75' (str)" in (rollout.error or "") for rollout in rollouts)


async def test_reasoning_is_parsed_without_tools_where_it_is_asked_for_and_the_servers_can() -> None:
    class Ended:
        stop_token_ids = (1,)
        template_kwargs: dict[str, Any] = {"enable_thinking": True}

        def decode(self, token_ids: Sequence[int]) -> str:
            return "all of it"

    pool = ParsingCounter()
    pool.parsed = ParsedText("{}", "hm")
    model = PolicyModel(make_rollout(turns=[], reward=None), cast(Chat, Ended()), pool, SAMPLING)
    turn = await model.generate([1, 2])
    assert await model.parse(turn, reasoning=True) == Reply("all of it")
    pool.parses_reasoning = True
    assert await model.parse(turn) == Reply("all of it")
    assert await model.parse(turn, reasoning=True) == Reply("{}", "hm")
    other = await model.generate([1, 2], CallOverrides(chat_template_kwargs={"enable_thinking": False}))
    await model.parse(other, reasoning=True)
    assert [asked[1] for asked in pool.asked] == [{"enable_thinking": True}, {"enable_thinking": False}]
