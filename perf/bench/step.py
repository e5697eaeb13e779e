"""The step boundary: the daemon's own, and the plain path, over the same rollouts, beside an idle loop and a copy of the bytes.

python -m perf.bench.step [--quick]
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from orchestrator.dump import open_dump, write_dump
from orchestrator.threads import in_thread
from perf import plain
from perf.bench.command import show
from perf.boundary import Recording
from perf.consumer import bare_consumer
from perf.figures import Case, Figure
from perf.lag_trace import LagTrace
from perf.replay import BASELINE, BOUNDARY, DELIVERY, JUDGE, Replay, Row, Settings, on_daemons_loop, replay, rows_of
from perf.synthesize import Shape, header_of, synthetic_rollouts
from perf.traffic import synthetic_traffic
from transport.arrays import AnyArray

SYNTHETIC_TASKS = 200
COPIES = 3
COPY_THREADS = 2


def measure(quick: bool) -> list[Case]:
    """The case of the step boundary."""
    shape = Shape(16 if quick else 64, 32, 16_384, even=True)
    rounds = 2 if quick else 5
    with tempfile.TemporaryDirectory(prefix="counterpoint-bench-") as directory:
        # Through a dump, so that every turn's bytes are its own: the synthetic ones share theirs.
        write_dump(Path(directory) / "dump", header_of(shape), synthetic_rollouts(shape))
        dump = open_dump(Path(directory) / "dump")
        dump.populate()
        recording = Recording(dump.header, dump.rollouts())
        settings = Settings(synthetic_tasks=SYNTHETIC_TASKS, rounds=rounds, baseline_seconds=1.0 if quick else 3.0)

        async def work() -> Case:
            copy_seconds = await _copy_seconds(recording)
            ours = await replay(recording, settings)
            beside = await _plain(recording, settings, Path(directory))
            return _case(recording, copy_seconds, ours, beside)

        return [on_daemons_loop(work)]


async def _copy_seconds(recording: Recording) -> float:
    """The shortest time in which numpy copies the rollouts' routing, by `COPY_THREADS` threads beside the same traffic."""
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

    seconds = []
    async with synthetic_traffic(SYNTHETIC_TASKS):
        for _ in range(COPIES + 1):  # the first allocates
            began = time.perf_counter()
            await asyncio.gather(*(in_thread(copy, first) for first in range(COPY_THREADS)))
            seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


async def _plain(recording: Recording, settings: Settings, directory: Path) -> list[Row]:
    """The rows of the plain path, with a baseline of its own."""
    rollouts = await in_thread(plain.as_received, recording.shipped)
    address = f"ipc://{directory}/plain.sock"
    with bare_consumer(address):
        async with LagTrace() as trace, synthetic_traffic(settings.synthetic_tasks):
            for step in range(1, settings.rounds + 1):
                with trace.span(BASELINE):
                    await asyncio.sleep(settings.baseline_seconds)
                with trace.span(BOUNDARY):
                    await plain.take(step, rollouts, directory / "plain.bin", address, trace.span)
    return rows_of(trace)


def _case(recording: Recording, copy_seconds: float, ours: Replay, beside: Sequence[Row]) -> Case:
    idle, judge, boundary, delivery = (ours.row(name) for name in (BASELINE, JUDGE, BOUNDARY, DELIVERY))
    theirs = {row.phase: row for row in beside}
    whole = judge.seconds + boundary.seconds + delivery.seconds
    p99, worst = (max(getattr(row.lag, name) for row in (judge, boundary, delivery)) for name in ("p99", "max"))
    return Case(
        f"step boundary, {len(recording.rollouts)} rollouts, {SYNTHETIC_TASKS} synthetic tasks",
        [
            Figure("bytes", recording.nbytes / 1e6, "MB"),
            Figure(f"copy of them, {COPY_THREADS} threads", copy_seconds, "s"),
            Figure("idle: lag p99", 1e3 * idle.lag.p99, "ms"),
            Figure("idle: lag max", 1e3 * idle.lag.max, "ms"),
            *(Figure(f"{row.phase}: wall", row.seconds, "s") for row in ours.rows if row is not idle),
            Figure("boundary: wall, at most 1.5 copies + 0.5 s", boundary.seconds, "s", 1.5 * copy_seconds + 0.5),
            Figure("lag p99 over idle's, judging and delivery included", p99 / idle.lag.p99, "x", 2.0),
            Figure("lag max over idle's, judging and delivery included", worst / idle.lag.max, "x", 2.0),
            *(Figure(f"plain: {row.phase}: wall", row.seconds, "s") for row in beside if row.phase != BASELINE),
            Figure("plain: lag max", 1e3 * theirs[BOUNDARY].lag.max, "ms"),
            Figure("plain's lag max over ours", theirs[BOUNDARY].lag.max / worst, "x", 10.0, "at least"),
            Figure(
                "plain's wall over ours, judging and delivery included",
                theirs[BOUNDARY].seconds / whole,
                "x",
                5.0,
                "at least",
            ),
        ],
    )


if __name__ == "__main__":
    show(measure)
