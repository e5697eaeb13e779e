"""One daemon of `perf.bench.fleet`, a process of its own: its pool of servers, its names of weights and its rollouts in flight.

It takes steps until `steps` are committed while the others are under way, so that as many rollouts are in flight at the end as
after the beginning, and updates a name of weights again and again. It prints what it measured as JSON.

    python -m perf.bench.fleet_daemon LOAD URL...
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import numpy as np
import uvloop

from counterpoint.inference.base import Probe, WeightUpdate
from counterpoint.inference.pool.pool import InferencePool, Served
from counterpoint.job.replay.lag_trace import LagTrace
from counterpoint.orchestrator.metrics import MetricsLine
from counterpoint.run.config import RunConfig
from counterpoint.run.loop_health.gc_tuning import RolloutCounts, collect_as_memory_grows, freeze_gc, infrequent_gc
from counterpoint.run.loop_health.threads import prompt_switching
from counterpoint.transport.process.child import run
from perf.bench.dispatching import run_to_the_end
from perf.bench.schedule import TurnsOnLoop, run_config
from perf.commands import PerfError
from perf.short_turns import ShortTurns
from perf.stalls import recorded_stalls

BETWEEN_UPDATES_SECONDS = 2.5
STARTS_AT_ONCE = 8
"""Names that take their first weights at once, each by a connection of its own to each server."""
DIGESTS = {"float32": {"layer": "0"}}


@dataclass(frozen=True, slots=True)
class Load:
    """What a daemon has to do."""

    daemon: int
    """Its number among those that share the servers."""
    in_flight: int
    names: int
    """Names of weights: the policy, and others."""
    steps: int
    """Steps until the end."""
    per_step: int
    """Rollouts of a step."""


@dataclass(frozen=True, slots=True)
class Found(TurnsOnLoop):
    """What a daemon measured, in seconds, bytes, and bytes a step."""

    lag_mean: float
    lag_p99: float
    lag_max: float
    unstalled_p99: float
    unstalled_max: float
    start: float
    """From the first server that was asked until all names were at all servers."""
    start_cpu: float
    """CPU seconds of that for a name at a server: it is checked, loads the weights and proves them."""
    updates: int
    longest_update: float
    """The longest until all servers had proven an update."""
    resident: float
    """The resident size at the end."""
    growth: float
    """The slope of the resident size by least squares, over the steps after those that began with the first rollouts."""


def found_by(load: Load, urls: Sequence[str]) -> Found:
    """Returns what a daemon measures, in a process of its own, whose resident size and CPU are then its own."""
    command = [sys.executable, "-P", "-m", __name__, json.dumps(asdict(load)), *urls]
    name = f"daemon {load.daemon} of the fleet"
    outcome = run(name, command, stderr=None)
    if outcome.code:
        raise PerfError(f"{name} ended with code {outcome.code}")
    return Found(**json.loads(outcome.output))


def measure(load: Load, urls: Sequence[str]) -> Found:
    """Plays the rollouts."""
    first = load.in_flight // load.per_step // 2  # steps while the first rollouts begin
    assert load.steps > first + 1, f"{load.steps} steps; memory is measured after {first} of them"
    logging.getLogger("counterpoint").setLevel(logging.ERROR)  # each failed answer is a warning
    with prompt_switching(), recorded_stalls() as stalls:
        played = uvloop.run(_played(load, urls))
    lag, unstalled = played.trace.distribution(), played.trace.less(stalls.within).distribution()
    settled = np.array(played.resident[first:])
    return Found(
        played.turns,
        played.seconds,
        played.cpu_seconds,
        lag.mean,
        lag.p99,
        lag.max,
        unstalled.p99,
        unstalled.max,
        played.start,
        played.start_cpu / len(urls) / load.names,
        len(played.updates),
        max(played.updates, default=0.0),
        float(settled[-1]),
        float(np.polyfit(np.arange(len(settled)), settled, 1)[0]),
    )


@dataclass(slots=True)
class _Played:
    start: float
    start_cpu: float
    trace: LagTrace
    updates: list[float]
    resident: list[int]
    """The resident size at each step."""
    turns: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0


async def _played(load: Load, urls: Sequence[str]) -> _Played:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        # Until the last step, there are rollouts of as many later ones as are in flight.
        config = run_config(directory, [*urls], load.in_flight, load.steps + 2 * load.in_flight // load.per_step)
        schedule = config.schedule.model_copy(update={"rollouts_per_step": load.per_step})
        config = config.model_copy(update={"schedule": schedule})
        pool = InferencePool(config.inference)
        names = [f"daemon-{load.daemon}-name-{number}" for number in range(load.names)]
        served = [pool.model(name) for name in names]
        began, cpu_began = time.perf_counter(), time.process_time()
        few = asyncio.Semaphore(STARTS_AT_ONCE)
        async with asyncio.TaskGroup() as starts:
            for each, name in zip(served, names, strict=True):
                starts.create_task(_start(each, published_weights(directory, 0, name), few))
        played = _Played(time.perf_counter() - began, time.process_time() - cpu_began, LagTrace(), [], [])
        updating = asyncio.create_task(_update_in_turn(served, names, directory, played.updates))
        await _play(config, served[0], load.steps, played)
        updating.cancel()
        for each in served:  # one after the other: each is given up at all servers at once
            await each.release()
    return played


async def _start(served: Served, weights: WeightUpdate, few: asyncio.Semaphore) -> None:
    async with few:
        await served.start()
        await served.update(weights)


async def _play(config: RunConfig, policy: Served, steps: int, played: _Played) -> None:
    """Takes the steps, and then ends what is in flight."""
    over = asyncio.Event()

    def publish(line: MetricsLine) -> None:
        played.resident.append(int(line["memory/rss_bytes"]))
        if len(played.resident) == steps:
            over.set()

    with infrequent_gc():
        freeze_gc()
        counts = RolloutCounts()
        collecting = asyncio.create_task(collect_as_memory_grows(counts))
        began, cpu_began = time.perf_counter(), time.process_time()
        async with played.trace:
            playing = asyncio.create_task(run_to_the_end(config, policy, ShortTurns(), counts, publish))
            waiting = asyncio.create_task(over.wait())
            await asyncio.wait([playing, waiting], return_when=asyncio.FIRST_COMPLETED)
        played.seconds, played.cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        played.turns = sum(server["requests"] for server in policy.fleet()["servers"])
        collecting.cancel()
        playing.cancel()
        await asyncio.wait([playing])
        if not playing.cancelled():
            playing.result()  # raises what ended it


async def _update_in_turn(
    served: Sequence[Served], names: Sequence[str], directory: Path, seconds: list[float]
) -> None:
    """Updates the policy and another name in turn, each time the next one."""
    for version in count(1):
        await asyncio.sleep(BETWEEN_UPDATES_SECONDS)
        number = version // 2 % len(names) if version % 2 else 0
        began = time.perf_counter()
        await served[number].update(published_weights(directory, version, names[number]))
        seconds.append(time.perf_counter() - began)


def published_weights(directory: Path, version: int, adapter: str) -> WeightUpdate:
    """Writes what a server reads of published weights."""
    published = directory / f"{adapter}-{version}"
    published.mkdir()
    probe = {"version": version, "token_ids": [1, 2, 3], "log_probabilities": [-1.0, -2.0], "digests": DIGESTS}
    (published / "probe.json").write_text(json.dumps(probe))
    return WeightUpdate(version, published, Probe.read(published / "probe.json"), adapter)


if __name__ == "__main__":
    print(json.dumps(asdict(measure(Load(**json.loads(sys.argv[1])), sys.argv[2:]))))
