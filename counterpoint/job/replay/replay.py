"""Replays a dump through the daemon's own step boundary and measures each phase's time and the event loop's lag meanwhile.

    counterpoint replay DUMP [--synthetic-traffic N] [--json] [--timeline FILE]

An idle baseline on the same loop, with the same synthetic traffic if there is any, precedes the boundary. What the boundary
writes goes to a temporary directory (below `TMPDIR`), which is removed.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from counterpoint.job.replay.boundary import Recording, Rig, rig
from counterpoint.job.replay.lag_trace import LagSpan, LagTrace
from counterpoint.job.replay.traffic import synthetic_traffic
from counterpoint.orchestrator.rollouts.dump import Dump
from counterpoint.run.loop_health.blame import LoopBlame
from counterpoint.run.loop_health.gc_tuning import freeze_gc, infrequent_gc
from counterpoint.run.loop_health.lag import LagDistribution
from counterpoint.run.loop_health.slow_spots import SlowSpot, SlowSpots
from counterpoint.run.loop_health.threads import in_thread, prompt_switching

Result = TypeVar("Result")

BASELINE_SECONDS = 3.0
PAUSE_SECONDS = 0.2
"""Pause around what is measured, until the work before it has no more effect."""
BASELINE, FINALIZE, AHEAD, BOUNDARY, DELIVERY = "idle", "finalize", "ahead", "boundary", "delivery"
"""The names of the rows that are not phases. `FINALIZE` finalizes all groups at once; the daemon does so one by one, before the
boundary. `AHEAD` writes the routing of all groups but the last, as the daemon does before it has that one. `BOUNDARY` is all of
its phases together. `DELIVERY` lasts from then until the consumer has read every byte."""

LATE_SECONDS, LATE_OVER_IDLE = 0.005, 1.5
"""A lag counts as a slow spot from this many seconds on, and from this multiple of the idle loop's 99th percentile."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a replay."""

    synthetic_tasks: int = 0
    """Tasks that keep the loop busy."""
    gather_chunk_size: int | None = None
    """Rollouts merged in one thread call; None takes the dump's own number."""
    process_pool: bool = False
    """Whether to merge in a process instead of a thread."""
    rounds: int = 1
    """How often the step is replayed."""
    baseline_seconds: float = BASELINE_SECONDS
    """Seconds of idle loop before each round."""


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """One phase: its wall time and the loop's lag while it ran."""

    phase: str
    seconds: float
    lag: LagDistribution


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay. A row covers all rounds of a phase; its seconds are the median round's."""

    rows: list[PhaseRow]
    slow_spots: list[SlowSpot]
    late_seconds: float
    """The lag from which on slow spots are looked for, of the round where it was longest."""
    trace: LagTrace
    nbytes: int
    """Bytes of all arrays of the rollouts."""

    def row(self, phase: str) -> PhaseRow:
        """Returns the row of one phase."""
        return next(row for row in self.rows if row.phase == phase)

    def as_json(self) -> dict[str, Any]:
        """Returns the result for programs."""
        return {
            "bytes": self.nbytes,
            "phases": [
                {"phase": row.phase, "seconds": row.seconds, "event_loop_lag": asdict(row.lag)} for row in self.rows
            ],
            "late_seconds": self.late_seconds,
            "event_loop_blame": [slow_spot.as_json() for slow_spot in self.slow_spots],
        }


def replay_dump(dump: Dump, settings: Settings) -> Replay:
    """Replays on a loop of its own, as the daemon's is. Raises `DumpError`, `OSError`, `ValueError`."""

    async def measure() -> Replay:
        return await replay(await load_recording(dump), settings)

    return on_daemons_loop(measure)


async def load_recording(dump: Dump) -> Recording:
    """Loads the dump in threads. Raises `DumpError`, `OSError`."""
    await in_thread(dump.populate)
    return Recording(dump.header, await in_thread(dump.rollouts))


def on_daemons_loop(work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Runs a coroutine function on uvloop, and lets threads switch as the daemon does."""
    with prompt_switching(), infrequent_gc(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work())


@asynccontextmanager
async def stage(recording: Recording, settings: Settings) -> AsyncIterator[tuple[LagTrace, Rig]]:
    """Provides a measurement on the running loop with its trace and its rig, in a temporary directory, beside the traffic."""
    chunk_size = settings.gather_chunk_size or recording.header.gather_chunk_size
    with tempfile.TemporaryDirectory(prefix="counterpoint-replay-") as directory:
        async with (
            LagTrace() as trace,
            rig(recording, Path(directory), chunk_size, settings.process_pool) as parts,
            synthetic_traffic(settings.synthetic_tasks),
        ):
            freeze_gc()
            await asyncio.sleep(PAUSE_SECONDS)  # so that the pause of freeze_gc is not part of the baseline
            yield trace, parts


async def replay(
    recording: Recording, settings: Settings, before_round: Callable[[], Awaitable[None]] | None = None
) -> Replay:
    """Replays on the running loop. `before_round` is awaited before the idle baseline of each round, beside the traffic."""
    slow_spots, longest = SlowSpots(), 0.0
    async with stage(recording, settings) as (trace, parts):
        for step in range(recording.header.step, recording.header.step + settings.rounds):
            if before_round is not None:
                await before_round()
            with trace.span(BASELINE):
                await asyncio.sleep(settings.baseline_seconds)
            idle = trace.distribution(trace.spans[-1])  # not what came before, such as the rig's own start
            late = max(LATE_SECONDS, LATE_OVER_IDLE * idle.p99)
            longest = max(longest, late)
            with LoopBlame(late) as blame:
                await _take(parts, step, trace)
            taken = blame.take()
            if not taken.watched:
                raise RuntimeError(
                    "the loop was not watched to the end, so slow spots are unknown; see the error above"
                )
            slow_spots.add(taken.by_key.values())
    return Replay(rows_of(trace), slow_spots.worst(), longest, trace, recording.nbytes)


async def _take(parts: Rig, step: int, trace: LagTrace) -> None:
    with trace.span(FINALIZE):
        await parts.finalize()
    with trace.span(AHEAD):
        await parts.write_ahead()
    with trace.span(BOUNDARY):
        phases = await parts.take(step)
    for name, intervals in phases.items():
        for interval in intervals:
            trace.add(name, interval.begin, interval.end)
    with trace.span(DELIVERY):
        await parts.deliver(step)


def rows_of(trace: LagTrace) -> list[PhaseRow]:
    """Computes a row for each name of the trace's spans, in the order of their first beginning."""
    spans: dict[str, list[LagSpan]] = {}
    for span in sorted(trace.spans, key=lambda span: span.start):
        spans.setdefault(span.name, []).append(span)
    return [
        PhaseRow(name, sorted(span.seconds for span in same)[len(same) // 2], trace.distribution(*same))
        for name, same in spans.items()
    ]
