"""Finds which phases of a step boundary block the loop and which only take time: each alone, then with all phases before it.

    counterpoint attribute DUMP [--synthetic-traffic 200] [--gather-chunk-size N] [--quick] [--process-pool]

Every round runs a whole step, since a phase needs the results of those before it. Only the phase or phases in question are
measured, with a pause around them. An idle baseline, on the same loop with the same traffic, precedes each round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from counterpoint.job.replay.boundary import Recording, Rig
from counterpoint.job.replay.lag_trace import LagTrace
from counterpoint.job.replay.replay import (
    BASELINE,
    FINALIZE,
    PAUSE_SECONDS,
    PhaseRow,
    Settings,
    load_recording,
    on_daemons_loop,
    rows_of,
    stage,
)
from counterpoint.orchestrator.rollouts.dump import Dump

BLOCKING_SECONDS = 0.005
"""A lag below this is not blocking, however quiet the idle loop is: threads delay the loop by a millisecond at a time."""

Phase = tuple[str, Callable[[], Awaitable[object]]]


@dataclass(frozen=True, slots=True)
class Attribution:
    """One phase's part: `alone`, and `together` with all phases before it."""

    phase: str
    alone: PhaseRow
    together: PhaseRow
    idle: PhaseRow

    @property
    def blocks(self) -> bool:
        """Whether the loop is late during the phase: at worst by twice its idle lag, and by more than `BLOCKING_SECONDS`."""
        return self.alone.lag.max > max(2 * self.idle.lag.max, BLOCKING_SECONDS)

    def as_json(self) -> dict[str, Any]:
        """Returns the result for programs."""
        return {
            "phase": self.phase,
            "blocks": self.blocks,
            "alone": {"seconds": self.alone.seconds, "event_loop_lag": asdict(self.alone.lag)},
            "together": {"seconds": self.together.seconds, "event_loop_lag": asdict(self.together.lag)},
        }


def attribute_dump(dump: Dump, settings: Settings) -> list[Attribution]:
    """Measures a dump on a loop of its own, as the daemon's is. Raises `DumpError`, `OSError`, `ValueError`."""

    async def measure() -> list[Attribution]:
        return await attribute(await load_recording(dump), settings)

    return on_daemons_loop(measure)


async def attribute(recording: Recording, settings: Settings) -> list[Attribution]:
    """Measures each phase, in order, on the running loop."""
    async with stage(recording, settings) as (trace, parts):
        count, step = len(_phases(parts, recording.header.step)), recording.header.step
        for _ in range(settings.rounds):
            for index in range(count):
                for first in {index, 0}:
                    phases = _phases(parts, step)
                    with trace.span(BASELINE):
                        await asyncio.sleep(settings.baseline_seconds)
                    await _measure(trace, phases, first, index + 1)
                    await parts.deliver(step)
                    step += 1
    rows = {row.phase: row for row in rows_of(trace)}
    names = [name for name, _ in phases]
    return [
        Attribution(name, rows[_label(names[index : index + 1])], rows[_label(names[: index + 1])], rows[BASELINE])
        for index, name in enumerate(names)
    ]


def _phases(parts: Rig, step: int) -> list[Phase]:
    """The phases of one step, ready to run."""
    return [(FINALIZE, parts.finalize), *parts.phases(step).items()]


async def _measure(trace: LagTrace, phases: Sequence[Phase], first: int, stop: int) -> None:
    """Runs all of `phases`, and measures `first` to `stop - 1` as one."""
    for _, phase in phases[:first]:
        await phase()
    await asyncio.sleep(PAUSE_SECONDS)  # until the phases before have no more effect
    with trace.span(_label([name for name, _ in phases[first:stop]])):
        for _, phase in phases[first:stop]:
            await phase()
    await asyncio.sleep(PAUSE_SECONDS)
    for _, phase in phases[stop:]:
        await phase()


def _label(names: Sequence[str]) -> str:
    return " + ".join(names)
