"""Playing an environment for its check, with a pool that answers at once: what is recorded is what the environment does."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from counterpoint.environments.base import Example, Model
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.sampling import SamplingConfig
from counterpoint.environments.workers.load import load_environment
from counterpoint.inference.base import SamplingParameters
from counterpoint.job.environments import waiting
from counterpoint.job.environments.findings import Level, findings
from counterpoint.job.environments.observe import Observations, Plan, observe
from counterpoint.models.tiny_tokenizer import write_tokenizer
from counterpoint.transport.records import Int32Array, Rollout, Turn
from tests.support.polling import until, wait_until

PLAN = Plan(examples=2, rollouts=2, rounds=3)


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


async def seen_of(kind: str, directory: Path, say: Callable[[str], None] = lambda text: None) -> Observations:
    write_tokenizer(directory, 1024)
    config = EnvironmentConfig(name="checked", kind=f"tests.job.environments.test_observe:{kind}")
    environment = load_environment(config)
    return await observe(
        config,
        environment,
        SamplingConfig(max_tokens=8),
        directory,
        Pool(),
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
    noisy = await seen_of("Noisy", tmp_path)
    assert (noisy.scored_again, len(noisy.changed_scores)) == (12, 12)
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
