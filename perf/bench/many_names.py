"""Measures a pool with many names of weights, up to 1,024: what it takes until servers have and have proven the new ones of all.

    python -m perf.bench.many_names [--quick | --full]

The pool is an orchestrator's or the service's, on uvloop, with two servers that answer at once (`perf.soak.fleet_servers`). All
names get new weights together, as after a step of as many runs, beside a few names that do the same.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import uvloop

from counterpoint.inference.pool.pool import InferencePool
from perf.bench.command import Size, show
from perf.bench.fleet_daemon import published_weights
from perf.bench.schedule import run_config
from perf.bench.servers import served_by
from perf.figures import Case, Figure

FEW = 16
VERSIONS = 2
"""Versions that are measured, after a first one, which makes the connections."""


def measure(size: Size) -> list[Case]:
    """Measures the case of many names."""
    names = size.pick(64, 256, 1024)
    with served_by("perf.soak.fleet_servers", "0.0", "0.0") as url:
        few, many = (uvloop.run(_updated(url, number)) for number in (FEW, names))
    over = (many[1] / names) / (few[1] / FEW)
    return [
        Case(
            f"{names} names of weights at two servers",
            [
                Figure("until both servers have proven the new ones of all", many[0], "s"),
                Figure("the pool's CPU for a name", 1e3 * many[1] / names, "ms"),
                Figure(f"that over the same of {FEW} names", over, "x", 1.5),
            ],
        )
    ]


async def _updated(url: str, number: int) -> tuple[float, float]:
    """Returns the wall and the CPU seconds of an update of so many names."""
    with tempfile.TemporaryDirectory() as place:
        pool = InferencePool(run_config(Path(place), [f"{url}/{number}-{each}" for each in range(2)], FEW, 1).inference)
        names = [pool.model(f"adapter-{each}") for each in range(number)]
        for name in names:
            await name.start()
        walls, cpus = [], []
        for version in range(1 + VERSIONS):
            updates = [published_weights(Path(place), version, name.name.model) for name in names]
            wall, cpu = time.perf_counter(), time.process_time()
            await asyncio.gather(*(name.update(update) for name, update in zip(names, updates, strict=True)))
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
        for name in names:
            await name.release()
    return statistics.median(walls[1:]), statistics.median(cpus[1:])


if __name__ == "__main__":
    show(measure)
