"""Measures the cost of watching a loop that is never late: the same work with and without `LoopBlame`, in turns in one run.

    python -m perf.blame_cost [--rounds 40] [--json]

The work is that of a daemon's loop, the synthetic tasks of `job/replay/traffic.py`, a fixed amount a turn. The figure is the CPU
time of the process for one turn. A round has a turn of every variant, in changing order; the least disturbed quarter of each
variant's turns counts. "Without, again" is a second turn without blame; its distance from the first is the error of measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

import uvloop
from rich.console import Console

from job.replay.traffic import one_round
from orchestrator.loop_health.blame import LoopBlame
from orchestrator.loop_health.threads import prompt_switching
from perf.figures import Case, Figure

_TASKS = 20
_ROUNDS_A_TASK = 125
_SETTLE_SECONDS = 0.05
_IDLE_SECONDS = 0.4

_THRESHOLDS = {"at 50 ms, the default": 0.05, "at 20 ms": 0.02, "at 5 ms": 0.005}
_WITHOUT, _AGAIN = "without", "without, again"
_MOST = 1.02
"""CPU time with blame at the default threshold over that without."""


async def busy() -> None:
    """Does a fixed amount of work, like a daemon with many rollouts in flight: tasks that compute a little and sleep a little."""
    generator = random.Random(0)

    async def work() -> None:
        for _ in range(_ROUNDS_A_TASK):
            await one_round(generator)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(_TASKS):
            tasks.create_task(work())


async def idle() -> None:
    """Sleeps."""
    await asyncio.sleep(_IDLE_SECONDS)


async def cpu_seconds(work: Callable[[], Awaitable[None]], threshold: float | None) -> float:
    """Returns the CPU time of the process for one turn of `work`, in seconds."""
    with LoopBlame(threshold) if threshold is not None else nullcontext():
        await asyncio.sleep(_SETTLE_SECONDS)  # to start a thread is paid once
        before = time.process_time()
        await work()
        return time.process_time() - before


async def measure(rounds: int) -> Case:
    """Measures every variant once a round."""
    variants = {_WITHOUT: None, _AGAIN: None, **_THRESHOLDS}
    order = random.Random(1)
    loaded: dict[str, list[float]] = {name: [] for name in variants}
    unloaded: dict[str, list[float]] = {name: [] for name in variants}
    await cpu_seconds(busy, None)
    for _ in range(rounds):
        for name in order.sample(list(variants), len(variants)):
            loaded[name].append(await cpu_seconds(busy, variants[name]))
            unloaded[name].append(await cpu_seconds(idle, variants[name]))
    busy_cpu = {name: _undisturbed(values) for name, values in loaded.items()}
    idle_cpu = {name: _undisturbed(values) for name, values in unloaded.items()}
    figures = [
        Figure(
            f"busy loop, {name}, over without",
            busy_cpu[name] / busy_cpu[_WITHOUT],
            "",
            _MOST if name == next(iter(_THRESHOLDS)) else None,
        )
        for name in (_AGAIN, *_THRESHOLDS)
    ]
    figures += [
        Figure(
            f"idle loop, {name}, of a core",
            (idle_cpu[name] - idle_cpu[_WITHOUT]) / _IDLE_SECONDS * 100,
            "%",
        )
        for name in (_AGAIN, *_THRESHOLDS)
    ]
    return Case("blame, when nothing is late", figures)


def _undisturbed(values: list[float]) -> float:
    """Returns the mean of the least quarter: other processes can only add to the CPU time of a fixed amount of work."""
    return statistics.mean(sorted(values)[: max(1, len(values) // 4)])


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="turns of each variant")
    parser.add_argument("--json", action="store_true", help="figures as JSON on standard output")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # a busy machine makes the loop late now and then; that is not the question here
    with prompt_switching():
        case = uvloop.run(measure(arguments.rounds))
    if arguments.json:
        print(json.dumps(case.as_json(), indent=2))
    else:
        Console().print(case.as_table())


if __name__ == "__main__":
    main()
