"""Playing an environment for its check, with a pool that answers at once: what is recorded is what the environment does."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from counterpoint.environments import lifecycle
from counterpoint.environments.base import EnvironmentContext, Example, Model
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.reward import Reward
from counterpoint.environments.sampling import SamplingConfig
from counterpoint.environments.workers.load import load_environment
from counterpoint.inference.base import SamplingParameters
from counterpoint.job.environments import observe as observing
from counterpoint.job.environments import rehearsal, waiting
from counterpoint.job.environments.findings import Level, findings
from counterpoint.job.environments.observe import Observations, PlayPlan, observe
from counterpoint.models.tiny_tokenizer import write_tokenizer
from counterpoint.transport.records import Int32Array, Rollout, Turn
from tests.support.polling import until, wait_until

PLAN = PlayPlan(examples=2, rollouts=2, rounds=3)


class Pool:
    """Answers every prompt with one token and the end of the turn."""

    async def generate(self, prompt_ids: Int32Array, sampling: SamplingParameters, **_keywords: Any) -> Turn:
        await asyncio.sleep(0)
        completion = np.array([65, sampling.stop_token_ids[0]], np.int32)
        return Turn(np.asarray(prompt_ids), completion, np.full(2, -0.5, np.float32), 0, "stop")


class Sound:
    """One turn; every second attempt is right."""

    group_scoring = False

    def __init__(self) -> None:
        self._attempts = 0

    def __len__(self) -> int:
        return 5

    def example(self, index: int) -> Example:
        return Example(index, f"question {index}")

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        self._attempts += 1
        state["right"] = self._attempts % 2
        await model.generate(model.chat.start([{"role": "user", "content": example.prompt}]))

    async def score(self, example: Example, rollout: Rollout) -> float:
        return float(rollout.state["right"])


class Unsound(Sound):
    """Does all that it should not."""

    _tasks: list[asyncio.Task[None]] = []

    def example(self, index: int) -> Example:
        return Example(index, f"{random.SystemRandom().getrandbits(64)}")

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        await super().rollout(example, model, state)
        await model.generate(model.chat.start([{"role": "user", "content": "something else"}]))
        if not self._tasks:
            self._tasks.append(asyncio.create_task(asyncio.sleep(3600), name="left"))
            time.sleep(1.0)  # noqa: ASYNC251 - the fault
        if example.index == 1 and state["right"]:
            raise KeyError("gone")

    async def score(self, example: Example, rollout: Rollout) -> float:
        return random.SystemRandom().uniform(0, 1)


class Noisy(Sound):
    """Scores a group as one, each time otherwise."""

    group_scoring = True

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> list[float]:
        return [random.SystemRandom().uniform(0, 1) for _ in rollouts]


class Parts(Sound):
    """Rewards its turn, in parts: the loop and the score say the same."""

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        await super().rollout(example, model, state)
        model.reward(state["right"])

    async def score(self, example: Example, rollout: Rollout) -> Any:
        return Reward(turns=[rollout.state["right"]])


class Chance(Sound):
    """Rewards its last turn otherwise each time, beside what the loop gave the first."""

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        await super().rollout(example, model, state)
        model.reward(0.25)
        await model.generate(model.chat.start([{"role": "user", "content": "and now?"}]))

    async def score(self, example: Example, rollout: Rollout) -> Any:
        assert rollout.turn_rewards is not None
        return Reward(turns=[*rollout.turn_rewards[:-1].tolist(), random.SystemRandom().uniform(0.5, 1)])


class ChanceOfGroup(Chance):
    """The same, of a group."""

    group_scoring = True

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> list[Any]:
        return [await self.score(example, rollout) for rollout in rollouts]


class Once(Sound):
    """Cannot score twice."""

    async def score(self, example: Example, rollout: Rollout) -> float:
        return float(rollout.state.pop("right"))


@pytest.fixture
async def ends_tasks() -> AsyncIterator[None]:
    yield
    for task in Unsound._tasks:
        task.cancel()
    await asyncio.gather(*Unsound._tasks, return_exceptions=True)


async def seen_of(
    kind: str,
    directory: Path,
    say: Callable[[str], None] = lambda text: None,
    serving: AbstractAsyncContextManager[Any] | None = None,
) -> Observations:
    write_tokenizer(directory, 1024)
    config = EnvironmentConfig(name="checked", kind=f"tests.job.environments.test_observe:{kind}")
    environment = load_environment(config)
    return await observe(
        config,
        environment,
        SamplingConfig(max_tokens=8),
        directory,
        serving or nullcontext(Pool()),
        PLAN,
        directory / "files",
        say=say,
    )


def places_of(seen: Observations) -> set[str]:
    """Returns the files that held the event loop."""
    return {spot.place.file for spot in seen.slow_spots.by_key.values()}


@pytest.mark.slow
async def test_a_sound_environment(tmp_path: Path) -> None:
    seen = await seen_of("Sound", tmp_path)
    assert [len(group) for group in seen.groups] == [2] * 6
    assert len(seen.memory) == 3
    by_check = {finding.check: finding.level for finding in findings(seen)}
    # The machine may be busy: what holds the loop and the memory of the process are not the environment's alone.
    assert {level for check, level in by_check.items() if check not in ("event loop", "memory")} == {Level.OK}


@pytest.mark.slow
@pytest.mark.usefixtures("ends_tasks")
class Crowded(Sound):
    """Notes how many rollouts are played at once."""

    playing = most = 0

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        type(self).playing += 1
        type(self).most = max(self.most, self.playing)
        await asyncio.sleep(0.001)
        await super().rollout(example, model, state)
        type(self).playing -= 1


@pytest.mark.parametrize(("at_once", "most"), [(3, 3), (128, 4)])
async def test_no_more_rollouts_are_played_at_once_than_the_job_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int, most: int
) -> None:
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "PLAN", PlayPlan(examples=2, rollouts=2, rounds=1, at_once=at_once))
    monkeypatch.setattr(Crowded, "most", 0)
    seen = await seen_of("Crowded", tmp_path)
    assert (len(seen.rollouts), Crowded.most) == (4, most)


async def test_an_unsound_environment(tmp_path: Path) -> None:
    seen = await seen_of("Unsound", tmp_path)
    by_check = {finding.check: finding for finding in findings(seen)}
    assert by_check["examples"].level is Level.ERROR
    assert "KeyError" in by_check["outcomes"].text
    assert by_check["scoring"].level is Level.WARNING
    assert by_check["event loop"].level is not Level.OK
    # The text names the worst place, which a busy machine may have made of another: of our own collection of garbage, say.
    assert any(place.endswith("test_observe.py") for place in places_of(seen))
    assert by_check["sequences"].level is Level.WARNING
    assert seen.left_tasks == ["left"]


@pytest.mark.slow
async def test_only_what_was_scored_again_counts_as_the_same(tmp_path: Path) -> None:
    sound = await seen_of("Sound", tmp_path)
    assert (sound.scored_again, sound.not_scored_again) == (12, [])
    parts = await seen_of("Parts", tmp_path)
    assert (parts.scored_again, parts.changed_scores, parts.not_scored_again) == (12, [], [])
    for kind in ("Noisy", "Chance", "ChanceOfGroup"):
        noisy = await seen_of(kind, tmp_path)
        assert (noisy.scored_again, len(noisy.changed_scores), noisy.not_scored_again) == (12, 12, [])
    once = await seen_of("Once", tmp_path)
    assert (once.scored_again, len(once.not_scored_again), once.not_scored_again[0]) == (0, 12, "KeyError: 'right'")
    [finding] = [each for each in findings(once) if each.check == "scoring"]
    assert "not checked for 12 scores" in finding.text


async def test_an_environment_that_does_not_load(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no class 'Nothing'"):
        await seen_of("Nothing", tmp_path)


class Hanging(Sound):
    """Each example hangs in a way of its own until enough was said."""

    said: list[str] = []

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        await super().rollout(example, model, state)
        if example.index:
            return
        await until(lambda: any("others wait: 2 at Hanging" in text for text in self.said), "the places")
        wait_until(lambda: any("blocked at Hanging" in text for text in self.said), "the blocked place")  # the fault


@pytest.mark.slow
async def test_what_a_rollout_hangs_at_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(waiting, "BLOCKED_SECONDS", 0.5)
    Hanging.said.clear()
    await seen_of("Hanging", tmp_path, Hanging.said.append)
    place = r"Hanging\.rollout \(.*test_observe\.py:\d+\)"
    waits = rf"after [\d.]+ s 2 of 4 rollouts of this round have ended, and others wait: 2 at {place}"
    assert any(re.fullmatch(waits, text) for text in Hanging.said), Hanging.said
    assert any("the event loop is blocked at Hanging.rollout" in text for text in Hanging.said), Hanging.said


class Mistaken(Sound):
    """Its subclasses have one mistake each."""

    async def _judge(self) -> float:
        return 1.0


class NoReturn(Mistaken):
    async def score(self, example: Example, rollout: Rollout) -> float:  # type: ignore[empty-body]
        pass


class Text(Mistaken):
    async def score(self, example: Example, rollout: Rollout) -> float:
        return "0.1"  # type: ignore[return-value]


class NotAwaited(Mistaken):
    async def score(self, example: Example, rollout: Rollout) -> float:
        return self._judge()  # type: ignore[return-value]


class NoTurn(Mistaken):
    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        model.generate(model.chat.start([{"role": "user", "content": example.prompt}]))  # type: ignore[unused-coroutine]


class TakenForATurn(Mistaken):
    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        turn = model.generate(model.chat.start([{"role": "user", "content": example.prompt}]))
        state["said"] = turn.completion_ids  # type: ignore[attr-defined]


class NoneOfAGroup(Mistaken):
    group_scoring = True

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> list[float]:  # type: ignore[empty-body]
        pass


class Unknown(Mistaken):
    async def score(self, example: Example, rollout: Rollout) -> float:
        return float(rollout.state["gone"])


class TooLong(Mistaken):
    def example(self, index: int) -> Example:
        return Example(index, "again " * 5000, "1000")


class NotANumber(Mistaken):
    async def score(self, example: Example, rollout: Rollout) -> float:
        return float("nan")


class NoJson(Mistaken):
    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        await super().rollout(example, model, state)
        state["seen"] = {1, 2}


class Endless(Mistaken):
    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        turn = await model.generate(model.chat.start([{"role": "user", "content": example.prompt}]))
        while True:
            turn = await model.generate(model.chat.extend(turn, [{"role": "user", "content": "again " * 500}]))


HERE = re.escape(__file__)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("NoReturn", rf"score returned None .*`return` \(in score, {HERE}:\d+\)"),
        ("Text", rf"score returned '0\.1' \(str\); expected a number \(in score, {HERE}:\d+\)"),
        ("NotAwaited", rf"`await` is missing before the call of _judge, {HERE}:\d+ \(in score, {HERE}:\d+\)"),
        ("NoTurn", rf"failed: .*; `await` is missing before the call of generate \(in rollout, {HERE}:\d+\)"),
        ("TakenForATurn", rf"`await` is missing before the call of generate \(in rollout, {HERE}:\d+\)"),
        ("NoneOfAGroup", rf"score_group returned None .*a list of numbers.*\(in score_group, {HERE}:\d+\)"),
        ("Unknown", rf"KeyError: 'gone' \(in score, {HERE}:\d+\)"),
        ("NotANumber", rf"score returned nan \(float\); expected a finite number \(in score, {HERE}:\d+\)"),
        ("NoJson", r"state\['seen'\] that is not JSON"),
        ("Endless", r"after \d+ turns: the conversation does not end"),
        ("TooLong", r"a prompt of \d+ tokens leaves no room in 4096 tokens of context; shorten it"),
    ],
)
async def test_a_mistake_is_named_before_a_server_starts(kind: str, said: str, tmp_path: Path) -> None:
    @asynccontextmanager
    async def serving() -> AsyncIterator[None]:
        pytest.fail("a server was started")
        yield

    with pytest.raises(ValueError, match=said):
        await seen_of(kind, tmp_path, serving=serving())


class Leaking(Sound):
    """Tells each answer, and prints what it should not."""

    def example(self, index: int) -> Example:
        return Example(index, f"Say {index + 1000}.", str(index + 1000))

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        await super().rollout(example, model, state)
        print("with", os.environ["THE_API_KEY"])


class Forever(Sound):
    async def score(self, example: Example, rollout: Rollout) -> float:
        while not rollout.state["right"]:
            pass
        return 1.0


class ForeverAfterAlarms(Forever):
    """Has a time limit of its own, which is an alarm, and lets that be afterwards."""

    async def score(self, example: Example, rollout: Rollout) -> float:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        return await super().score(example, rollout)


class ForeverForAGroup(Sound):
    group_scoring = True

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> list[float]:
        while True:
            pass


@pytest.fixture
def keeps_alarms() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.signal(signal.SIGALRM, before)


class Insisting(Sound):
    """Asks until the answer has the form that it wants, and has others write."""

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        subprocess.run(["/bin/true"], stdout=sys.stdout, check=True)  # noqa: ASYNC221 - it ends at once
        prompt = model.chat.start([{"role": "user", "content": example.prompt}])
        while "<answer>" not in model.chat.decode((await model.generate(prompt)).completion_ids.tolist()):
            pass


@pytest.mark.slow
async def test_answers_that_are_told_and_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("THE_API_KEY", "sk-0123456789")
    by_check = {finding.check: finding for finding in findings(await seen_of("Leaking", tmp_path))}
    assert by_check["answers"].level is Level.WARNING
    assert "'1000' in " in by_check["answers"].text
    assert by_check["secrets"].level is Level.ERROR
    assert "$THE_API_KEY is printed" in by_check["secrets"].text
    assert not capsys.readouterr().out, "it is kept for the findings"


@pytest.mark.slow
@pytest.mark.usefixtures("keeps_alarms")
@pytest.mark.parametrize("kind", ["Forever", "ForeverAfterAlarms", "ForeverForAGroup"])
async def test_a_loop_without_an_end_is_ended(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(waiting, "BLOCKED_SECONDS", 0.1)
    monkeypatch.setattr(rehearsal, "SECONDS", 0.3)
    with pytest.raises(
        ValueError, match=rf"TimeoutError: held the event loop for over 0\.3 s.* \(in score\w*, {HERE}:\d+"
    ):
        await seen_of(kind, tmp_path)


@pytest.mark.slow
async def test_what_made_up_answers_never_end_is_left_to_real_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(waiting, "BLOCKED_SECONDS", 0.5)
    monkeypatch.setattr(rehearsal, "SECONDS", 0.3)

    class Started(Exception):
        pass

    @asynccontextmanager
    async def serving() -> AsyncIterator[None]:
        raise Started
        yield

    with pytest.raises(Started):
        await seen_of("Insisting", tmp_path, serving=serving())


async def test_code_that_gives_the_loop_back_at_the_last_moment_is_not_ended() -> None:
    main, waits = threading.get_ident(), asyncio.create_task(asyncio.sleep(60))

    def end() -> None:
        wait_until(lambda: sys._current_frames()[main].f_code.co_name == "select", "the loop to be idle")
        signal.pthread_kill(main, waiting.END)

    with waiting.saying([waits], __name__, print, 1.0):
        await asyncio.to_thread(end)
    waits.cancel()


class NeverStarted(Sound):
    async def start(self, context: EnvironmentContext) -> None:
        await asyncio.Event().wait()


class BlockingAtItsStart(Sound):
    async def start(self, context: EnvironmentContext) -> None:
        while True:
            pass


class FailingAtItsStart(Sound):
    async def start(self, context: EnvironmentContext) -> None:
        raise TimeoutError("the sandbox is away")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("NeverStarted", rf"its start failed: it took more than 0\.3 s \(in start, {HERE}:\d+"),
        ("BlockingAtItsStart", rf"its start failed: TimeoutError: held the event loop for .* \(in start, {HERE}:\d+"),
        ("FailingAtItsStart", rf"its start failed: TimeoutError: the sandbox is away \(in start, {HERE}:\d+"),
    ],
)
async def test_a_start_without_an_end_is_named_and_ended(
    kind: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(waiting, "BLOCKED_SECONDS", 0.1)
    for module in (lifecycle, observing):
        monkeypatch.setattr(module, "START_SECONDS", 0.3)
    with pytest.raises(ValueError, match=said):
        await seen_of(kind, tmp_path)


def test_code_without_an_end_is_told_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PATIENCE_SECONDS", 0.02)
    said: list[str] = []

    def endless() -> None:
        with waiting.ending("making examples", said.append, 0.05):
            while True:
                time.sleep(0.01)

    with pytest.raises(TimeoutError, match=r"making examples has not ended after 0\.05 s"):
        endless()
    assert re.search(
        r"making examples goes on at test_code_without_an_end\w*\.<locals>\.endless \(.*test_observe\.py:\d+\)", said[0]
    )
