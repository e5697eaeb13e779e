"""Measures the step boundary beside an idle loop, a copy and a write of the same bytes.

python -m perf.bench.step [--quick | --full]
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from counterpoint.job.replay.boundary import Recording
from counterpoint.job.replay.lag_trace import LagSpan, LagTrace
from counterpoint.job.replay.replay import (
    BASELINE,
    BOUNDARY,
    DELIVERY,
    FINALIZE,
    PAUSE_SECONDS,
    Replay,
    Settings,
    on_daemons_loop,
    replay,
    rows_of,
)
from counterpoint.job.replay.synthesize import Shape, header_of, synthetic_rollouts
from counterpoint.orchestrator.rollouts.dump import open_dump, write_dump
from counterpoint.run.loop_health.lag import LagDistribution
from counterpoint.run.loop_health.threads import in_thread
from counterpoint.transport.arrays import AnyArray
from perf.bench.command import Size, show
from perf.figures import Case, Figure
from perf.stalls import Stalls, recorded_stalls

SYNTHETIC_TASKS = 200
COPY_THREADS = 2


def measure(size: Size) -> list[Case]:
    """Measures the case `step`."""
    shape = Shape(size.pick(8, 32, 64), 32, 16_384, even=True)
    with tempfile.TemporaryDirectory(prefix="counterpoint-bench-") as directory:
        # Through a dump, so that every turn's bytes are its own: the synthetic ones share theirs.
        write_dump(Path(directory) / "dump", header_of(shape), synthetic_rollouts(shape))
        dump = open_dump(Path(directory) / "dump")
        dump.populate()
        recording = Recording(dump.header, dump.rollouts())
        settings = Settings(
            synthetic_tasks=SYNTHETIC_TASKS, rounds=size.pick(2, 8, 8), baseline_seconds=size.pick(1.0, 2.0, 3.0)
        )
        with recorded_stalls() as stalls:
            measured = on_daemons_loop(lambda: _measure(recording, settings, Path(directory)))
    return [_case(recording, measured).beside(_case(recording, measured.less(stalls)), stalls)]


@dataclass(frozen=True, slots=True)
class Bare:
    """What a boundary cannot do without: the seconds of each round."""

    copies: Sequence[float]
    """numpy copies the routing, by `COPY_THREADS` threads."""
    writes: Sequence[float]
    """A thread writes as many bytes to a new file, and waits until they are on the disk."""

    def times(self, name: str, walls: Sequence[float]) -> Figure:
        """Returns how many times longer the best of our rounds takes than the least copy and the least write, which is bound."""
        return Figure(name, min(walls) / (min(self.copies) + min(self.writes)), "x", 1.5)


@dataclass(frozen=True, slots=True)
class Measured:
    """Rounds of the boundary, on a quiet loop and beside the tasks."""

    quiet: Replay
    ours: Replay
    alone: Bare
    """The copies and writes beside the rounds of `quiet`."""
    beside: Bare
    """The copies and writes beside the rounds of `ours` and their tasks."""

    def less(self, stalls: Stalls) -> Measured:
        """Returns the same with the lag less the times in which the machine stood still."""
        trace = self.ours.trace.less(stalls.within)
        return replace(self, ours=replace(self.ours, trace=trace, rows=rows_of(trace)))


async def _measure(recording: Recording, settings: Settings, directory: Path) -> Measured:
    alone = replace(settings, synthetic_tasks=0, baseline_seconds=PAUSE_SECONDS)
    quiet, bare_alone = await _ours(recording, alone, directory)
    ours, bare_beside = await _ours(recording, settings, directory)
    return Measured(quiet, ours, bare_alone, bare_beside)


async def _ours(recording: Recording, settings: Settings, directory: Path) -> tuple[Replay, Bare]:
    """Replays the rounds, each after a bare copy and write: a disk is at one time twice as fast as a minute later."""
    copies, writes = [], []
    copy = _copier(recording)
    await copy()  # which maps the memory
    data = bytes(recording.nbytes)

    async def bare() -> None:
        copies.append(await copy())
        writes.append(await _write_seconds(data, directory / "bare"))

    found = await replay(recording, settings, bare)
    return found, Bare(copies, writes)


async def _write_seconds(data: bytes, path: Path) -> float:
    def write() -> None:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    began = time.perf_counter()
    await in_thread(write)
    seconds = time.perf_counter() - began
    await in_thread(path.unlink)
    return seconds


def _copier(recording: Recording) -> Callable[[], Coroutine[Any, Any, float]]:
    """Returns a function that copies the routing with numpy, by `COPY_THREADS` threads, and returns the seconds."""
    arrays = [
        turn.routed_experts
        for rollout in recording.rollouts
        for turn in rollout.turns
        if turn.routed_experts is not None
    ]
    copies: list[AnyArray] = [np.empty_like(array) for array in arrays]

    def copy(first: int) -> None:
        for target, source in zip(copies[first::COPY_THREADS], arrays[first::COPY_THREADS], strict=True):
            np.copyto(target, source)

    async def seconds() -> float:
        began = time.perf_counter()
        await asyncio.gather(*(in_thread(copy, first) for first in range(COPY_THREADS)))
        return time.perf_counter() - began

    return seconds


def _case(recording: Recording, measured: Measured) -> Case:
    quiet, ours, alone, beside = measured.quiet, measured.ours, measured.alone, measured.beside
    return Case(
        f"step boundary, {len(recording.rollouts)} rollouts, {SYNTHETIC_TASKS} synthetic tasks",
        [
            Figure("bytes", recording.nbytes / 1e6, "MB"),
            Figure(f"copy of their routing, {COPY_THREADS} threads, quiet loop", min(alone.copies), "s"),
            Figure("the same beside the tasks", min(beside.copies), "s"),
            Figure("bare write and fsync of as many bytes, quiet loop", min(alone.writes), "s"),
            Figure("the same beside the tasks", min(beside.writes), "s"),
            Figure("idle: lag p99", 1e3 * ours.row(BASELINE).lag.p99, "ms"),
            Figure("idle: lag max", 1e3 * ours.row(BASELINE).lag.max, "ms"),
            *(Figure(f"{row.phase}: wall", row.seconds, "s") for row in ours.rows if row.phase != BASELINE),
            Figure("finalize + boundary: wall", min(_walls(ours)), "s"),
            beside.times("the same over a bare copy and write", _walls(ours)),
            Figure("finalize + boundary: wall, quiet loop", min(_walls(quiet)), "s"),
            alone.times("the same over a bare copy and write, quiet loop", _walls(quiet)),
            *(_over_idle(ours.trace, quantity) for quantity in ("p99", "max")),
        ],
    )


def _walls(found: Replay) -> list[float]:
    """Returns, for each round, the seconds of what the reference system does at its boundary, until the wire has the batch.

    Filtering is included.
    """
    finalizing, boundary = (
        [span.seconds for span in found.trace.spans if span.name == name] for name in (FINALIZE, BOUNDARY)
    )
    return [*map(sum, zip(finalizing, boundary, strict=True))]


def _over_idle(trace: LagTrace, quantity: str) -> Figure:
    """Returns, for the median round, the lag from finalizing to delivery over that of an idle stretch as long."""
    ratios = [getattr(busy, quantity) / getattr(idle, quantity) for idle, busy in _rounds(trace)]
    name = f"lag {quantity} over idle's, median round"
    return Figure(name, statistics.median(ratios), "x", 2.0, rounds=tuple(ratios))


def _rounds(trace: LagTrace) -> list[tuple[LagDistribution, LagDistribution]]:
    """Returns, for each of our rounds, the lag of an idle stretch and that from finalizing to delivery, which is as long.

    The idle stretch is the end of the baseline before: a maximum grows with the time over which it is taken.
    """
    rounds = [[span for span in trace.spans if span.name == name] for name in (BASELINE, FINALIZE, DELIVERY)]
    found = []
    for baseline, finalizing, delivery in zip(*rounds, strict=True):
        seconds = min(baseline.seconds, delivery.end - finalizing.start)
        idle = trace.distribution(LagSpan("idle", baseline.end - seconds, baseline.end))
        found.append((idle, trace.distribution(LagSpan("busy", finalizing.start, delivery.end))))
    return found


if __name__ == "__main__":
    show(measure)
