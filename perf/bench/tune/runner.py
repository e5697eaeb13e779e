"""Measures the tuner's loop: CPU time of the runner for a result, with 10 to 10,000 trials in an experiment.

    python -m perf.bench.tune.runner [--quick | --full]

No processes: an executor answers at once. Everything else is as in an experiment: the state machine, the journal, the search
algorithm's thread, which is told each result. All trials run at the same time, and report in turn.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from orchestrator.loop_health.gc_tuning import freeze_gc, infrequent_gc
from perf.bench.command import Size, show
from perf.bench.tune.immediate_executor import ImmediateExecutor, PlainTrials
from perf.figures import Case, Figure
from tune.runner.trial_runner import TrialRunner

TRIALS = (10, 1_000, 10_000)

ROUNDS = 3
"""Passes over each number of trials, in turn; the fastest counts."""

WITHOUT_END = 10**9
"""Results."""

BATCH = 8


def measure(size: Size) -> list[Case]:
    """Measures the case `tune-runner`."""
    results = size.pick(2_000, 10_000, 40_000)
    with infrequent_gc(), tempfile.TemporaryDirectory() as place:
        seconds = asyncio.run(_measure(Path(place), results))
    least, most = TRIALS[0], TRIALS[-1]
    figures = [Figure("results each", ROUNDS * results, "")]
    figures += [Figure(f"a result with {count:,} trials", 1e6 * min(each), "us") for count, each in seconds.items()]
    ratio = min(seconds[most]) / min(seconds[least])
    figures.append(Figure(f"a result with {most:,} trials over {least}", ratio, "x", 2.0))
    return [Case("tune-runner", figures)]


async def _measure(place: Path, results: int) -> dict[int, list[float]]:
    """Seconds a result, for each number of trials and each pass."""
    runners = {count: await _all_running(place / str(count), count) for count in TRIALS}
    freeze_gc()
    seconds: dict[int, list[float]] = {count: [] for count in TRIALS}
    try:
        for _ in range(ROUNDS):
            for count, runner in runners.items():
                seconds[count].append(await _seconds_a_result(runner, results))
    finally:
        for runner in runners.values():
            await runner.cleanup()
    return seconds


async def _all_running(place: Path, count: int) -> TrialRunner:
    """An experiment whose trials all run and have reported once."""
    algorithm = PlainTrials(count, str(place), WITHOUT_END)
    executor = ImmediateExecutor(count, WITHOUT_END, BATCH)
    runner = TrialRunner(algorithm, local_checkpoint_dir=place, trial_executor=executor, checkpoint_period=WITHOUT_END)
    while len(runner.get_trials()) < count or not all(trial.num_results for trial in runner.get_trials()):
        await runner.step_async()
    runner.checkpoint(force=True)
    return runner


async def _seconds_a_result(runner: TrialRunner, results: int) -> float:
    """CPU seconds of this thread for a result, over so many."""
    before = sum(trial.num_results for trial in runner.get_trials())
    began = time.thread_time()
    for _ in range(results // BATCH):
        await runner.step_async()
    seconds = time.thread_time() - began
    return seconds / (sum(trial.num_results for trial in runner.get_trials()) - before)


if __name__ == "__main__":
    show(measure)
