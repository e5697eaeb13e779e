"""Measures what a hundred viewers of the page cost a loop on the same machine: the lag of the `schedule` bench beside them.

`counterpoint serve` shows a job of eight runs whose files grow. Each viewer polls every two seconds, as the page does: the
overview, a run's curves and its loop. The loop plays the rollouts of the `schedule` bench, alone and beside the viewers in turn,
so that both meet the same machine. The viewers themselves yield the CPU: they would be on other machines.

    python -m perf.bench.serve.viewers [--quick | --full]
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import uvloop

from orchestrator.loop_health.threads import prompt_switching
from perf.bench.command import Size, show
from perf.bench.schedule import Measured, measure_rollouts
from perf.bench.servers import load_server
from perf.figures import Case, Figure
from perf.synthetic_jobs import shipped_lines, write_job
from transport.files.json_lines import append_line

VIEWERS = 100
POLL_SECONDS = 2.0
RUNS, PAST_STEPS = 8, 1000
GROWTH_SECONDS = 0.5
SETTLE_SECONDS = 3.0

PATHS = ("overview", "jobs/job/metrics?run={run}&metric=reward/mean&metric=loss", "jobs/job/runs/{run}/loop")


def measure(size: Size) -> list[Case]:
    """Measures the case `serve-viewers`: some 45 s; 20 s when quick."""
    in_flight, rounds = size.pick(512, 1024, 4096), size.pick(1, 3, 5)
    alone: list[Measured] = []
    beside: list[Measured] = []
    answers = {"sent": 0, "new": 0, "failed": 0}
    with tempfile.TemporaryDirectory() as directory, load_server(0.05) as url, prompt_switching():
        job = Path(directory) / "job"
        job.mkdir()
        runs = write_job(job, RUNS, PAST_STEPS)
        with _growing(job, runs):
            for _ in range(rounds):
                alone.append(uvloop.run(measure_rollouts(url, in_flight)))
                with _viewed(job, answers):
                    beside.append(uvloop.run(measure_rollouts(url, in_flight)))
    return [_case(in_flight, alone, beside, answers)]


@contextmanager
def _growing(job: Path, runs: list[str]) -> Iterator[None]:
    """Each run gets a further line of metrics, again and again. In a thread, half of whose work is to wait."""
    stop = threading.Event()
    line = next(shipped_lines(1, time.time()))

    def grow() -> None:
        step = PAST_STEPS
        while not stop.wait(GROWTH_SECONDS):
            step += 1
            for run in runs:
                append_line(job / f"run_{run}" / "metrics.jsonl", {**line, "step": step, "time": time.time()})

    thread = threading.Thread(target=grow, name="growing job")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def _viewed(job: Path, answers: dict[str, int]) -> Iterator[None]:
    """The server of the page and its viewers. Adds what was answered to `answers`."""
    command = [sys.executable, "-P", "-m", "cli.main", "serve", str(job), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        token = (job / "serve" / "read.token").read_text().strip()
        command = [sys.executable, "-P", "-m", "perf.bench.serve.viewers", "--view", address]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as viewers:
            assert viewers.stdin is not None
            assert viewers.stdout is not None
            viewers.stdin.write(f"{token}\n")
            viewers.stdin.flush()
            time.sleep(SETTLE_SECONDS)  # until all are connected
            yield
            viewers.stdin.close()
            counted = json.loads(viewers.stdout.read())
        server.terminate()
    for name, count in counted.items():
        answers[name] += count


async def _view(address: str, token: str) -> dict[str, int]:
    """Polls until the standard input ends."""
    counted = {"sent": 0, "new": 0, "failed": 0}
    headers = {"Authorization": f"Bearer {token}"}
    connector = aiohttp.TCPConnector(limit=0, force_close=False)

    async def view(number: int) -> None:
        tags: dict[str, str] = {}
        await asyncio.sleep(POLL_SECONDS * number / VIEWERS)
        while True:
            for path in PATHS:
                url = f"{address}api/v1/{path.format(run=f'run-{number % RUNS:04d}')}"
                known = {"If-None-Match": tags[url]} if url in tags else {}
                async with session.get(url, headers=headers | known) as response:
                    await response.read()
                    counted["sent"] += 1
                    counted["new"] += response.status == 200
                    counted["failed"] += response.status not in (200, 304)
                    tags[url] = response.headers.get("ETag", "")
            await asyncio.sleep(POLL_SECONDS)

    async with aiohttp.ClientSession(connector=connector) as session:
        viewing = [asyncio.create_task(view(number)) for number in range(VIEWERS)]
        await asyncio.to_thread(sys.stdin.read)
        for task in viewing:
            task.cancel()
        await asyncio.gather(*viewing, return_exceptions=True)
    return counted


def _case(in_flight: int, alone: list[Measured], beside: list[Measured], answers: dict[str, int]) -> Case:
    p99, viewed = (statistics.median(each.lag.p99 for each in measured) for measured in (alone, beside))
    ratios = tuple(with_viewers.lag.p99 / without.lag.p99 for with_viewers, without in zip(beside, alone, strict=True))
    rate, viewed_rate = (
        statistics.median(each.turns / each.seconds for each in measured) for measured in (alone, beside)
    )
    return Case(
        "serve-viewers",
        [
            Figure("rollouts in flight", in_flight, ""),
            Figure("viewers", VIEWERS, ""),
            Figure("their requests", answers["sent"], ""),
            Figure("of these answered with something new", answers["new"], ""),
            Figure("of these failed", answers["failed"], "", 0.0, timed=False),
            Figure("turns a second, alone", rate, "1/s"),
            Figure("turns a second, beside viewers", viewed_rate, "1/s"),
            Figure("lag, alone: p99", 1e3 * p99, "ms"),
            Figure("lag, beside viewers: p99", 1e3 * viewed, "ms"),
            Figure("lag p99, times that without viewers", viewed / p99, "x", 1.1, rounds=ratios),
        ],
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--view"]:
        os.nice(19)
        print(json.dumps(uvloop.run(_view(sys.argv[2], sys.stdin.readline().strip()))))
    else:
        show(measure)
