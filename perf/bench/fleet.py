"""Measures a daemon's loop beside many servers: 1,024 rollouts in flight at 16, and 16,384 at 256 in full.

The daemon's own scheduler, dispatcher, rollouts, step boundary and inference pool run on uvloop. The servers answer after times
of a law of lengths, and of their answers one in a thousand is a closed connection (`perf.soak.fleet_servers`, four processes).
Beside the policy the pool holds other names of weights, and meanwhile the policy and one of them get new weights again and again.

    python -m perf.bench.fleet [--quick | --full]
"""

from __future__ import annotations

import asyncio
import json
import resource
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import uvloop

from counterpoint.inference.base import Probe, WeightUpdate
from counterpoint.inference.pool.pool import InferencePool, Served
from counterpoint.run.loop_health.threads import prompt_switching
from perf.bench.command import Size, show
from perf.bench.schedule import Measured, measured, run_config
from perf.bench.servers import served_by
from perf.figures import Case, Figure
from perf.stalls import recorded_stalls

PROCESSES = 4
FAILED_SHARE = 0.001
STEPS = 8
"""Steps, each of an eighth of the rollouts in flight."""
BETWEEN_UPDATES_SECONDS = 5.0
DIGESTS = {"float32": {"layer": "0"}}


def measure(size: Size) -> list[Case]:
    """Measures the case `fleet`."""
    in_flight, servers, names = size.pick((512, 8, 4), (1024, 16, 8), (16_384, 256, 64))
    median = size.pick(0.1, 0.5, 6.0)
    with ExitStack() as stack:
        words = (str(median), str(FAILED_SHARE))
        hosts = [stack.enter_context(served_by("perf.soak.fleet_servers", *words)) for _ in range(PROCESSES)]
        urls = [f"{hosts[number % PROCESSES]}/{number}" for number in range(servers)]
        stack.enter_context(prompt_switching())
        stalls = stack.enter_context(recorded_stalls())
        found, updates = uvloop.run(_measured(urls, in_flight, names))
    case = _case(in_flight, servers, names, found, updates)
    return [case.beside(_case(in_flight, servers, names, found.less(stalls), updates), stalls)]


async def _measured(urls: list[str], in_flight: int, names: int) -> tuple[Measured, list[float]]:
    """Plays the rollouts; returns what was measured, and the seconds of each update of weights."""
    with tempfile.TemporaryDirectory() as directory:
        config = run_config(Path(directory), urls, in_flight, STEPS)
        pool = InferencePool(config.inference)
        policy, *others = (pool.model("none" if not number else f"adapter-{number}") for number in range(names))
        for name in (policy, *others):
            await name.start()
        for number, name in enumerate(others, 1):
            await name.update(_weights(Path(directory), 0, f"adapter-{number}"))
        seconds: list[float] = []
        updating = asyncio.create_task(_update(policy, others[0], Path(directory), seconds))
        found = await measured(config, policy)
        updating.cancel()
        for name in (policy, *others):
            await name.release()
    return found, seconds


async def _update(policy: Served, other: Served, directory: Path, seconds: list[float]) -> None:
    """Updates both again and again."""
    version = 0
    while True:
        await asyncio.sleep(BETWEEN_UPDATES_SECONDS)
        version += 1
        began = time.monotonic()
        updates = (_weights(directory, version, None), _weights(directory, version, "adapter-1"))
        await asyncio.gather(policy.update(updates[0]), other.update(updates[1]))
        seconds.append(time.monotonic() - began)


def _weights(directory: Path, version: int, adapter: str | None) -> WeightUpdate:
    """Writes what a server reads of published weights."""
    published = directory / f"{adapter}-{version}"
    published.mkdir()
    probe = {"version": version, "token_ids": [1, 2, 3], "log_probabilities": [-1.0, -2.0], "digests": DIGESTS}
    (published / "probe.json").write_text(json.dumps(probe))
    return WeightUpdate(version, published, Probe.read(published / "probe.json"), adapter)


def _case(in_flight: int, servers: int, names: int, found: Measured, updates: list[float]) -> Case:
    return Case(
        f"fleet, {servers} servers, {names} names of weights",
        [
            Figure("rollouts in flight", in_flight, ""),
            Figure("turns", found.turns, ""),
            Figure("turns a second", found.turns / found.seconds, "1/s"),
            Figure("CPU a turn", found.cost, "us"),
            Figure("lag: mean", 1e3 * found.lag.mean, "ms"),
            Figure("lag: p99", 1e3 * found.lag.p99, "ms", 10.0),
            Figure("lag: max", 1e3 * found.lag.max, "ms", 40.0),
            Figure("updates of two names", len(updates), ""),
            Figure("the longest until every server had proven both", max(updates, default=0.0), "s", 2.0),
            Figure("peak of the resident size", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "MiB"),
        ],
    )


if __name__ == "__main__":
    show(measure)
