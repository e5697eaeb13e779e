"""Measures what metrics cost: an observation, a scrape, and the lag of a busy loop that is scraped, beside one that is not.

python -m perf.telemetry_cost
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop

from orchestrator.loop_health.lag import quantile, samples_of
from orchestrator.loop_health.threads import prompt_switching
from orchestrator.telemetry.catalogue import ENVIRONMENT_METRIC, LAG, ORCHESTRATOR, PHASE
from transport.telemetry.endpoint import Endpoint
from transport.telemetry.values import Histogram

OBSERVATIONS = 300_000
SERIES = 500
"""Series of a run with several environments; its histograms come on top."""

SCRAPES_A_SECOND = 2
"""Twenty times as many as a Prometheus every ten seconds."""

ROUNDS, ROUND_SECONDS = 6, 3.0
SAMPLE_SECONDS = 0.001
TASKS = 200

CLIENT = """
import sys, time, urllib.request
while True:
    urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/metrics", timeout=10).read()
    time.sleep(1 / float(sys.argv[2]))
"""


def main() -> None:
    """Prints the figures."""
    print(f"an observation: {observation_seconds() * 1e9:.0f} ns")
    with prompt_switching(), Endpoint(0, ORCHESTRATOR, {"run": "bench"}) as endpoint:
        for number in range(SERIES):
            endpoint.values.set(ENVIRONMENT_METRIC, number, "environment", f"metric {number}")
        for phase in ("generation", "merge", "records", "commit", "wait_trainer", "malloc_trim"):
            endpoint.values.histogram(PHASE, phase).observe(0.1)
        print(
            f"a scrape of {SERIES} series and {len(ORCHESTRATOR.metrics)} metrics: {scrape_seconds(endpoint) * 1e3:.1f} ms"
        )
        without: list[float] = []
        beside: list[float] = []
        for _ in range(ROUNDS):  # in turn, so that what else the machine does meets both
            without += uvloop.run(lags())
            with client(endpoint.port):
                beside += uvloop.run(lags())
    for share in (0.5, 0.99, 0.999):
        before, after = quantile(sorted(without), share), quantile(sorted(beside), share)
        print(
            f"lag, quantile {share}: {before * 1e3:.2f} ms; scraped {SCRAPES_A_SECOND} times a second {after * 1e3:.2f} ms"
        )


def observation_seconds() -> float:
    """The time of one observation into a histogram."""
    histogram = Histogram(LAG.buckets)
    began = time.perf_counter()
    for _ in range(OBSERVATIONS):
        histogram.observe(0.003)
    return (time.perf_counter() - began) / OBSERVATIONS


def scrape_seconds(endpoint: Endpoint) -> float:
    """The time of reading and formatting all values once, the best of several."""
    from transport.telemetry.exposition import Exposition

    exposition, times = Exposition(endpoint.values, {"run": "bench"}), []
    for _ in range(20):
        began = time.perf_counter()
        exposition.encode("application/openmetrics-text")
        times.append(time.perf_counter() - began)
    return min(times)


async def lags() -> list[float]:
    """The lags of a loop with many tasks that each compute a little, one for each millisecond, also within a stall."""
    tasks = [asyncio.create_task(_work()) for _ in range(TASKS)]
    found, end = list[float](), time.perf_counter() + ROUND_SECONDS
    while (now := time.perf_counter()) < end:
        await asyncio.sleep(SAMPLE_SECONDS)
        found += samples_of(max(0.0, time.perf_counter() - now - SAMPLE_SECONDS), SAMPLE_SECONDS)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found


async def _work() -> None:
    while True:
        sum(range(300))
        await asyncio.sleep(0.02)


@contextmanager
def client(port: int) -> Iterator[None]:
    """Scrapes from a process of its own during the block."""
    with subprocess.Popen([sys.executable, "-c", CLIENT, str(port), str(SCRAPES_A_SECOND)]) as process:
        time.sleep(0.5)
        try:
            yield
        finally:
            process.kill()


if __name__ == "__main__":
    main()
