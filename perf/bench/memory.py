"""Measures memory: the peak of one step boundary over the bytes in flight, and the growth of the process over 500 steps.

    python -m perf.bench.memory [--quick | --full]

The rollouts' arrays are copied from a dump for every step, as if they had arrived, and are freed after it. Resident size is
the process's own; the consumer is another.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from counterpoint.job.replay.boundary import Recording, Rig, rig
from counterpoint.job.replay.replay import on_daemons_loop
from counterpoint.job.replay.synthesize import Shape, header_of, synthetic_rollouts
from counterpoint.orchestrator.rollouts.dump import open_dump, write_dump
from counterpoint.transport.process.resident import peak_bytes, resident_bytes
from counterpoint.transport.records import Rollout, Turn
from perf.bench.command import Size, show
from perf.figures import Case, Figure

LARGE = Shape(64, 32, 16_384, even=True)
SMALL = Shape(16, 8, 1024, even=True)
STEPS, SETTLED_AFTER = 500, 100
"""The first steps fill caches and pools; growth is counted after them."""

_RESET_PEAK = "5"


def measure(size: Size) -> list[Case]:
    """Measures the case `memory`."""
    large = replace(LARGE, rollouts=size.pick(16, 64, 64))
    steps = STEPS // size.pick(5, 2, 1)
    with tempfile.TemporaryDirectory(prefix="counterpoint-bench-") as directory:
        figures = on_daemons_loop(lambda: _peak(large, Path(directory) / "large"))
        figures += on_daemons_loop(lambda: _growth(SMALL, steps, Path(directory) / "small"))
    return [Case("memory", figures)]


async def _peak(shape: Shape, directory: Path) -> list[Figure]:
    """Returns the peak of one boundary, after another one that has filled the caches."""
    recorded = _recorded(shape, directory)
    async with rig(recorded, directory) as parts:
        await _take(parts, 1)
        before = resident_bytes()
        arrived = replace(parts, recording=_as_arrived(recorded))
        held = resident_bytes() - before
        _reset_peak()
        await _take(arrived, 2)
        peak = peak_bytes() - before
    nbytes = recorded.nbytes
    return [
        Figure("bytes in flight", nbytes / 1e6, "MB"),
        Figure("resident for them before the boundary", held / nbytes, "x"),
        Figure("peak over bytes in flight", peak / nbytes, "x", 1.25, slack=1.2, timed=False),
    ]


async def _growth(shape: Shape, steps: int, directory: Path) -> list[Figure]:
    """Returns the slope, by least squares, over the steps after the first fifth."""
    recorded = _recorded(shape, directory)
    resident = []
    async with rig(recorded, directory) as parts:
        for step in range(1, steps + 1):
            await _take(replace(parts, recording=_as_arrived(recorded)), step)
            resident.append(resident_bytes())
    settled = resident[len(resident) * SETTLED_AFTER // STEPS :]
    slope = float(np.polyfit(np.arange(len(settled)), np.array(settled) / 1e6, 1)[0])
    return [
        Figure(f"bytes of each of {steps} steps", recorded.nbytes / 1e6, "MB"),
        Figure("growth of resident size a step", slope, "MB", 0.5, timed=False),
        Figure("growth over the bytes of a step", slope / (recorded.nbytes / 1e6), "x", 0.02, timed=False),
    ]


def _recorded(shape: Shape, directory: Path) -> Recording:
    write_dump(directory / "dump", header_of(shape), synthetic_rollouts(shape))
    dump = open_dump(directory / "dump")
    return Recording(dump.header, dump.rollouts())


def _as_arrived(recorded: Recording) -> Recording:
    """Returns the same rollouts with arrays in memory of their own."""
    return replace(recorded, rollouts=[_copied(rollout) for rollout in recorded.rollouts])


def _copied(rollout: Rollout) -> Rollout:
    return replace(rollout, turns=[_copied_turn(turn) for turn in rollout.turns], tokens=None, branches=None)


def _copied_turn(turn: Turn) -> Turn:
    assert turn.routed_experts is not None
    return replace(
        turn,
        prompt_ids=turn.prompt_ids.copy(),
        completion_ids=turn.completion_ids.copy(),
        log_probabilities=turn.log_probabilities.copy(),
        routed_experts=turn.routed_experts.copy(),
    )


async def _take(parts: Rig, step: int) -> None:
    await parts.finalize()
    await parts.take(step)
    await parts.deliver(step)


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)


if __name__ == "__main__":
    show(measure)
