"""Measures the memory and the pauses of 12,000 rollouts of an environment whose objects form reference cycles.

Only the cyclic collector frees those. The daemon's policy for it (`orchestrator/loop_health/gc_tuning.py`) is compared with
Python's, each in a process of its own: peak of the resident size, and how long the collections held the loop.

    python -m perf.bench.garbage [--quick | --full]
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from environments.base import Example, Model
from environments.config import EnvironmentConfig
from inference.base import SamplingParameters
from orchestrator.loop_health.gc_tuning import RolloutCounts, collect_as_memory_grows, freeze_gc, infrequent_gc
from perf.bench.command import Size, show
from perf.bench.dispatching import run_to_the_end
from perf.figures import Case, Figure
from run.config import RunConfig, ScheduleConfig
from transport.process.resident import peak_bytes, resident_bytes
from transport.records import Int32Array, Rollout, Turn

ROLLOUTS = 12_000
IN_FLIGHT, GROUP_SIZE, ROLLOUTS_PER_STEP = 512, 8, 256
TURNS = 4
DELAY_SECONDS = 0.02
NODES, NODE_TEXT = (
    400,
    "an observation of a hundred characters, as tools and sandboxes give them, one to each node of the tree ",
)
"""Nodes of each rollout's tree: some 300 KB."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one process."""

    peak: int
    """Bytes of resident size above those before the first rollout."""
    pauses: Sequence[float]
    """CPU seconds of each collection of more than the youngest generation."""


def measure(size: Size) -> list[Case]:
    """Measures the case `garbage`, in 25 s; 45 s in full; 5 s when quick."""
    rollouts = ROLLOUTS // size.pick(8, 2, 1)
    ours, default = _in_a_process(_play_with_ours, rollouts), _in_a_process(_play, rollouts)
    return [
        Case(
            "garbage",
            [
                Figure("rollouts", rollouts, ""),
                Figure("peak of memory, Python's defaults", default.peak / 1e6, "MB"),
                Figure("peak of memory", ours.peak / 1e6, "MB"),
                Figure(
                    "peak over that of Python's defaults", ours.peak / default.peak, "x", 1.5, slack=1.5, timed=False
                ),
                *_pauses("Python's defaults", default.pauses),
                *_pauses("ours", ours.pauses),
            ],
        )
    ]


def _pauses(whose: str, pauses: Sequence[float]) -> list[Figure]:
    return [
        Figure(f"long collections, {whose}", len(pauses), ""),
        Figure(f"long collections, {whose}: sum", 1e3 * sum(pauses), "ms"),
        Figure(f"long collections, {whose}: longest", 1e3 * max(pauses, default=0.0), "ms"),
    ]


def _in_a_process(play: Callable[[int], Coroutine[Any, Any, Measured]], rollouts: int) -> Measured:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        return processes.submit(_run, play, rollouts).result()


def _run(play: Callable[[int], Coroutine[Any, Any, Measured]], rollouts: int) -> Measured:
    return uvloop.run(play(rollouts))


async def _play_with_ours(rollouts: int) -> Measured:
    with infrequent_gc():
        freeze_gc()
        counts = RolloutCounts()
        collecting = asyncio.create_task(collect_as_memory_grows(counts))
        try:
            return await _play(rollouts, counts)
        finally:
            collecting.cancel()


async def _play(rollouts: int, counts: RolloutCounts | None = None) -> Measured:
    with tempfile.TemporaryDirectory() as directory:
        config = RunConfig(
            run_id="bench",
            output_dir=Path(directory),
            model="none",
            steps=rollouts // ROLLOUTS_PER_STEP,
            environments=[EnvironmentConfig(name="trees", kind="perf.bench.garbage:Trees")],
            schedule=ScheduleConfig(
                group_size=GROUP_SIZE,
                rollouts_per_step=ROLLOUTS_PER_STEP,
                max_inflight_rollouts=IN_FLIGHT,
                # All turns are of version 0, which is never stale.
                max_off_policy_steps=rollouts // ROLLOUTS_PER_STEP,
            ),
        )
        config.run_dir.mkdir()
        before = resident_bytes()
        with _timed_collections() as pauses:
            await run_to_the_end(config, _Pool(), Trees(), counts or RolloutCounts())
    return Measured(peak_bytes() - before, pauses)


@contextmanager
def _timed_collections() -> Iterator[list[float]]:
    """Collects the CPU seconds of each collection that was not of the youngest objects alone."""
    pauses: list[float] = []
    began = 0.0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal began
        if info["generation"] and phase == "start":
            began = time.thread_time()
        elif info["generation"]:
            pauses.append(time.thread_time() - began)

    gc.callbacks.append(note)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(note)


@dataclass
class Node:
    """An observation in an environment, below the one before."""

    parent: Node | None
    text: str
    children: list[Node] = field(default_factory=list)


class Trees:
    """An environment whose rollouts keep a tree of observations with references to their parents, and drop it at their end."""

    group_scoring = False

    def __len__(self) -> int:
        return 1 << 20

    def example(self, index: int) -> Example:
        """Returns no conversation."""
        return Example(index, "")

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        """Adds an observation at each turn."""
        root = Node(None, "")
        for turn in range(TURNS):
            await model.generate([1, 2, 3])
            for number in range(NODES // TURNS):
                root.children.append(Node(root, f"{NODE_TEXT * 4} {turn} {number}"))

    async def score(self, example: Example, rollout: Rollout) -> float:
        """Rewards a rollout by its number."""
        return float(rollout.rollout_id.rpartition("-")[2])

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> Sequence[float]:
        """Is not called."""
        raise NotImplementedError


class _Pool:
    """A client that answers after a while, without a server."""

    def forget_group(self, affinity: str) -> None:
        """Forgets nothing, since it remembers nothing."""

    async def generate(
        self, prompt_ids: Int32Array, sampling: SamplingParameters, *, affinity: str, routed_experts_start: int = 0
    ) -> Turn:
        await asyncio.sleep(DELAY_SECONDS)
        return Turn(
            prompt_ids=prompt_ids,
            completion_ids=np.array([4, 5], dtype=np.int32),
            log_probabilities=np.full(2, -0.5, dtype=np.float32),
            policy_version=0,
            finish_reason="stop",
        )


if __name__ == "__main__":
    show(measure)
