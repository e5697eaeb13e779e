"""A step's rollouts are freed, and those in flight at a drain cancelled, a group at a time: no pass of the loop has hundreds."""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.inference.base import SamplingParameters
from counterpoint.orchestrator.dispatcher import Dispatcher
from counterpoint.run.config import RunConfig, ScheduleConfig
from counterpoint.run.loop_health.gc_tuning import RolloutCounts
from counterpoint.transport.records import Int32Array, Turn
from perf.bench import dispatching
from perf.bench.dispatching import run_to_the_end
from perf.short_turns import TURNS, ShortTurns

GROUPS, GROUP_SIZE = 16, 4


class Passes:
    """Counts the passes of the running loop, and what is noted in each: each watched array, once it is freed."""

    def __init__(self) -> None:
        self.noted: Counter[int] = Counter()
        self._number = 0

    def watch(self, array: object) -> None:
        weakref.finalize(array, self.note)

    def note(self) -> None:
        self.noted[self._number] += 1

    async def run(self) -> None:
        while True:
            self._number += 1
            await asyncio.sleep(0)


class Pool:
    """A client that answers at once."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self.forgotten: list[str] = []
        """Groups that it was told to forget."""

    def forget_group(self, affinity: str) -> None:
        self.forgotten.append(affinity.rpartition("-")[0])

    async def generate(
        self, prompt_ids: Int32Array, sampling: SamplingParameters, *, affinity: str, routed_experts_start: int = 0
    ) -> Turn:
        log_probabilities = np.full(2, -0.5, dtype=np.float32)
        self._passes.watch(log_probabilities)
        return Turn(prompt_ids, np.array([4, 5], dtype=np.int32), log_probabilities, 0, "stop")


class DeafPool(Pool):
    """A client that never answers."""

    def __init__(self, passes: Passes) -> None:
        super().__init__(passes)
        self.asked = 0

    async def generate(self, *_: object, **__: object) -> Turn:
        self.asked += 1
        try:
            await asyncio.Event().wait()
        finally:
            self._passes.note()
        raise AssertionError


ROLLOUTS = GROUPS * GROUP_SIZE


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    config = RunConfig(
        run_id="run",
        output_dir=tmp_path,
        model="none",
        steps=1,
        environments=[EnvironmentConfig(name="short", kind="perf.short_turns:ShortTurns")],
        schedule=ScheduleConfig(
            group_size=GROUP_SIZE, rollouts_per_step=ROLLOUTS, max_inflight_rollouts=ROLLOUTS, max_lead_steps=1
        ),
    )
    config.run_dir.mkdir()
    return config


async def test_a_pass_of_the_loop_frees_no_more_than_a_group(config: RunConfig) -> None:
    passes = Passes()
    counting = asyncio.create_task(passes.run())
    pool = Pool(passes)
    counts = RolloutCounts()
    await run_to_the_end(config, pool, ShortTurns(), counts)
    async with asyncio.timeout(60):  # a thread that finalized a group may still refer to it
        while passes.noted.total() < ROLLOUTS * TURNS:  # noqa: ASYNC110 - nobody announces it
            await asyncio.sleep(0)
    counting.cancel()
    assert passes.noted.total() == ROLLOUTS * TURNS
    assert max(passes.noted.values()) <= GROUP_SIZE * TURNS
    assert counts.let_go == ROLLOUTS, "the collector knows that only the groups of the step are held no more"
    assert len(pool.forgotten) == len(set(pool.forgotten)) >= GROUPS, "the pool forgets each group that ended, once"


async def test_a_pass_of_a_drain_cancels_no_more_than_a_group(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Dispatcher] = []

    class Kept(Dispatcher):
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            made.append(self)

    monkeypatch.setattr(dispatching, "Dispatcher", Kept)
    passes = Passes()
    counting = asyncio.create_task(passes.run())
    pool = DeafPool(passes)
    playing = asyncio.create_task(run_to_the_end(config, pool, ShortTurns(), RolloutCounts()))
    async with asyncio.timeout(60):
        while pool.asked < ROLLOUTS:  # noqa: ASYNC110 - nobody announces it
            await asyncio.sleep(0)
        await made[0].drain()
    counting.cancel()
    playing.cancel()
    assert passes.noted.total() == ROLLOUTS
    assert max(passes.noted.values()) <= GROUP_SIZE
