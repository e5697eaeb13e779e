"""Measures the overview and the curves of 1,000 runs of 10,000 steps: ten jobs of 100 runs, 1.3 GB of metrics, in full one job.

    python -m perf.bench.serve.scale [--quick | --full]

The jobs are those of `perf/synthetic_jobs.py`, with locks held: they seem to run. *First* is right after the start, with
nothing read yet; the files are in the page cache, since they were just written. A ratio compares runs of 10,000 steps with
runs of 100: the overview must not depend on how long a run is. Memory is what the process grows by at its peak.
"""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from perf.bench.command import Size, show
from perf.figures import Case, Figure
from perf.synthetic_jobs import running, shipped_lines
from serve.api.loop import LoopParameters, loop_health
from serve.api.overview import OverviewParameters, overview
from serve.api.runs import MetricsParameters, metrics
from serve.jobs import Jobs
from transport.files.json_lines import append_line

CURVES = (
    "reward/mean", "reward/std", "staleness/mean", "tokens/completion", "completion_tokens_per_second", "seconds_a_step",
    "loss", "entropy", "mismatch_kl", "grad_norm", "tokens_per_second", "importance_ratio/max",
)  # fmt: skip

SHORT_STEPS = 100
DISTINCT = 8
"""Runs with contents of their own."""

MIB = 2**20


def measure(size: Size) -> list[Case]:
    """Measures the case `serve-scale`: 30 s, seconds when quick, minutes in full."""
    jobs = size.pick(2, 10, 1)
    runs = size.pick(20, 100, 1000)
    steps = size.pick(1_000, 10_000, 10_000)
    viewed = size.pick(20, 64, 64)
    with tempfile.TemporaryDirectory(prefix="serve-scale-") as directory, ExitStack() as stack:
        short = _write(Path(directory) / "short", jobs, runs, SHORT_STEPS)
        long = _write(Path(directory) / "long", jobs, runs, steps)
        _allow_files((runs + 1) * 2 * jobs)
        ids = [f"run-{number:04d}" for number in range(runs)]
        for job in (*short, *long):
            stack.enter_context(running(job, ids))
        figures = [Figure("runs", jobs * runs, ""), Figure("steps each", steps, "")]
        first_short = _seconds(lambda: _overview(Jobs(short)))
        figures += _overview_figures(long, ids, steps, first_short)
        figures += _curve_figures(Jobs(long), long[0].name, ids[:viewed])
    return [Case("serve-scale", figures)]


def _overview_figures(directories: Sequence[Path], ids: Sequence[str], steps: int, first_short: float) -> list[Figure]:
    before, jobs = _resident(), Jobs(directories)
    count = len(directories) * len(ids)
    processor = time.process_time()
    first = _seconds(lambda: _overview(jobs))
    processor = time.process_time() - processor
    again = min(_seconds(lambda: _overview(jobs)) for _ in range(3))
    line = {**next(iter(shipped_lines(1, time.time()))), "step": steps + 1}
    for run_id in ids[:DISTINCT]:  # the others are links to these
        append_line(directories[0] / f"run_{run_id}" / "metrics.jsonl", line)
    changed = _seconds(lambda: _overview(jobs))
    return [
        Figure(f"overview of {count:,} runs: first", first, "s", 1.0),
        Figure("overview: first, of a core", processor, "s", 1.0),
        Figure("overview: again", again, "s", 1.0),
        Figure("overview: after a step of every run", changed, "s", 1.0),
        Figure(f"overview: first, of {steps:,} steps over {SHORT_STEPS}", first / first_short, "x", 3.0),
        Figure("overview: memory", (_resident() - before) / MIB, "MiB", 200.0, timed=False),
    ]


def _curve_figures(jobs: Jobs, job: str, ids: Sequence[str]) -> list[Figure]:
    before = _resident()

    def view(run_ids: Sequence[str]) -> bool:
        found = metrics(jobs, MetricsParameters(job=job, run=[*run_ids], metric=[*CURVES]))
        found.model_dump_json()
        return not found.unreadable

    def view_whole(run_ids: Sequence[str]) -> None:
        while not view(run_ids):  # one answer reads on for some seconds
            pass

    first = _seconds(lambda: view_whole(ids[:1]))
    again = _seconds(lambda: view(ids[:1]))
    other = _seconds(lambda: view(ids[1:2]))
    for begin in range(0, len(ids), 8):
        view(ids[begin : begin + 8])
    loop = _seconds(lambda: loop_health(jobs, LoopParameters(job=job, run=ids[-1])).model_dump_json())
    return [
        Figure(f"{len(CURVES)} curves of a run: first of its job", first, "s", 10.0),
        Figure("curves: again", again, "s", 0.5),
        Figure("curves: of another run", other, "s", 2.0),
        Figure("curves: again over first", again / first, "x", 0.5),
        Figure("lag and blame of a run", loop, "s", 2.0),
        Figure(f"curves of {len(ids)} runs: memory", (_resident() - before) / MIB, "MiB", 300.0, timed=False),
    ]


def _overview(jobs: Jobs) -> None:
    """As the API answers."""
    found = overview(jobs, OverviewParameters())
    found.model_dump_json()
    if found.runs and found.runs[0].step == 0:
        raise RuntimeError(f"the overview has no step of {found.runs[0]}")


def _write(directory: Path, jobs: int, runs: int, steps: int) -> list[Path]:
    """Writes jobs in a process of its own, whose memory is not ours. All have the contents of the first."""
    directories = [directory / f"job-{number}" for number in range(jobs)]
    command = [sys.executable, "-m", "perf.synthetic_jobs", str(directories[0])]
    command += ["--runs", str(runs), "--steps", str(steps), "--distinct", str(DISTINCT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    for other in directories[1:]:
        for path in directories[0].rglob("*"):
            place = other / path.relative_to(directories[0])
            place.parent.mkdir(parents=True, exist_ok=True)
            if path.name == "metrics.jsonl":
                os.link(path, place)
            elif path.is_file():
                place.write_bytes(path.read_bytes())
    return directories


def _allow_files(count: int) -> None:
    """Allows this process so many open files: locks are held by them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, count + 256)), hard))


def _seconds(work: Callable[[], object]) -> float:
    gc.collect()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _resident() -> float:
    """The peak of the process's memory so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


if __name__ == "__main__":
    show(measure)
