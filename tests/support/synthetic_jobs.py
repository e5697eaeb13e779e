"""Directories of jobs that never ran: N runs of M steps with every metric that our roles write, made in seconds.

    python -m tests.support.synthetic_jobs DIRECTORY [--runs 8] [--steps 1000] [--distinct 16]

For tests of what reads jobs (`counterpoint/serve/`), and for looking at a page with much in it. The job is healthy: its reward
rises, nothing fails often, nothing is late. Lines are those of `orchestrator/step/step_metrics.py` and
`counterpoint/trainer/shells/steps.py`, in their order. Only `distinct` runs have contents of their own; the others' files are
hard links to theirs, which readers cannot tell apart, so that 1,000 runs of 10,000 steps take seconds and little space. The
trainer's file is written in full.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import tomli_w

from counterpoint.cluster.worker_view import State, WorkerView
from counterpoint.job.directory import JOB_FILE, JOB_LOCK, lock_file_of
from counterpoint.job.processes_file import ProcessesFile
from counterpoint.run.config import RunConfig
from counterpoint.transport.files.lock import take_lock

STEP_SECONDS = 10.0
"""The mean duration of a step."""

ENVIRONMENTS = ("reverse-text", "guess-number")

ROLLOUTS = 128
"""Rollouts of a step."""

Line = dict[str, Any]


def write_job(
    directory: Path,
    runs: int = 1,
    steps: int = 100,
    *,
    wanted: int | None = None,
    ended: float | None = None,
    seed: int = 0,
    distinct: int | None = None,
) -> list[str]:
    """Writes a job whose runs have `steps` steps, of `wanted` (all of them), the last at `ended` (now). Returns the runs' ids.

    At most `distinct` runs have contents of their own (all of them). The directory must not hold a job yet.
    """
    ended = time.time() if ended is None else ended
    run_ids = [f"run-{number:04d}" for number in range(runs)]
    sources = max(1, min(runs, distinct or runs))
    lines = [list(shipped_lines(steps, ended, seed + number)) for number in range(sources)]
    (directory / "trainer").mkdir(parents=True)
    for number, run_id in enumerate(run_ids):
        first = directory / f"run_{run_ids[number % sources]}" / "metrics.jsonl"
        own = directory / f"run_{run_id}" / "metrics.jsonl"
        own.parent.mkdir()
        if number < sources:
            own.write_bytes(b"".join(map(_encoded, lines[number])))
        else:
            os.link(first, own)
    _write_trained(directory / "trainer" / "metrics.jsonl", run_ids, lines, seed)
    _write_configurations(directory, run_ids, wanted or steps)
    _write_processes(directory, run_ids, State.STOPPED)
    return run_ids


@contextmanager
def running(directory: Path, run_ids: Sequence[str]) -> Iterator[None]:
    """Holds the locks of the job and of these runs, so that they seem to run, in this process."""
    with ExitStack() as stack:
        _write_processes(directory, run_ids, State.RUNNING)
        stack.callback(_write_processes, directory, run_ids, State.STOPPED)
        for path in (directory / JOB_LOCK, *(lock_file_of(directory, run_id) for run_id in run_ids)):
            stack.callback(os.close, take_lock(path, f"{path} is taken"))
        yield


def shipped_lines(steps: int, ended: float, seed: int = 0) -> Iterator[Line]:
    """Yields the lines that an orchestrator writes; the last step ends at `ended`."""
    generator = np.random.default_rng([seed, 0])
    seconds_S = STEP_SECONDS * np.exp(0.15 * generator.standard_normal(steps))
    times_S = ended - seconds_S.sum() + np.cumsum(seconds_S)
    noise_SN = generator.standard_normal((steps, 6))
    failed_S = generator.binomial(ROLLOUTS, 0.005, steps)
    for step in range(1, steps + 1):
        noise_N = [float(value) for value in noise_SN[step - 1]]
        reward = 0.1 + 0.8 * step / (step + 200) + 0.02 * noise_N[0]
        seconds, at = float(seconds_S[step - 1]), float(times_S[step - 1])
        uptime = at - ended + float(seconds_S.sum())
        yield _shipped(step, at, uptime, seconds, reward, int(failed_S[step - 1]), noise_N)


def _shipped(
    step: int, at: float, uptime: float, seconds: float, reward: float, failed: int, noise: list[float]
) -> Line:
    filtered = 16 + round(4 * noise[1])
    completion = 40_000 + round(3_000 * noise[2])
    lag = 0.002 * float(np.exp(0.3 * noise[3]))
    late = 0.06 if step % 500 == 0 else 0.0
    failures: Line = {f"failures/{ENVIRONMENTS[1]}/KeyError": failed} if failed else {}
    rewards = {f"reward/{name}/mean": reward + 0.05 * sign for name, sign in zip(ENVIRONMENTS, (1, -1), strict=True)}
    return {
        "step": step,
        "rollouts/completed": ROLLOUTS - failed,
        "rollouts/failed": failed,
        "rollouts/inference_failed": 0,
        "rollouts/filtered": filtered,
        "tokens/prompt": 20_000,
        "tokens/completion": completion,
        "tokens/untrained": 0,
        **failures,
        "staleness/mean": 1.5 + 0.1 * noise[4],
        "staleness/max": 2,
        "batch/samples": ROLLOUTS - failed - filtered,
        "batch/tokens": completion + 15_000,
        "batch/bytes": 21 * (completion + 15_000),
        "reward/mean": reward,
        "reward/std": 0.35,
        "reward/min": 0.0,
        "reward/max": 1.0,
        **rewards,
        "inference/cache_hit_share": 0.6,
        **{f"environment/{name}/turns/mean": 2.5 + 0.1 * noise[5] for name in ENVIRONMENTS},
        "time": at,
        "uptime_seconds": uptime,
        "rollouts/cancelled": 0,
        **{f"examples/{name}/epoch": 0.01 * step for name in ENVIRONMENTS},
        **{f"filters/zero_advantage/{name}": filtered // 2 for name in ENVIRONMENTS},
        "event_loop_lag/min": 0.0,
        "event_loop_lag/mean": lag / 4,
        "event_loop_lag/median": lag / 5,
        "event_loop_lag/p90": lag / 2,
        "event_loop_lag/p99": lag,
        "event_loop_lag/max": lag + late,
        "event_loop_lag/n": round(10 * seconds),
        "event_loop_late/n": int(late > 0),
        "event_loop_late/callback": late,
        "event_loop_late/gil": 0.0,
        "event_loop_late/wait": 0.0,
        "event_loop_late/machine": 0.0,
        "event_loop_late/unknown": 0.0,
        "event_loop_blame": [_slow_spot(late)] if late else [],
        "inflight/rollouts": ROLLOUTS,
        "inflight/evaluation_rollouts": 0,
        "policy/version": step - 1,
        "memory/rss_bytes": 400_000_000 + 1_000 * (step % 100),
        "phase/generation": 0.7 * seconds,
        "phase/wait_trainer": 0.25 * seconds,
        "phase/wait_inference": 0.02 * seconds,
        "phase/finalize": 0.01 * seconds,
        "phase/merge": 0.01 * seconds,
        "phase/records": 0.005 * seconds,
        "phase/commit": 0.003 * seconds,
        "phase/malloc_trim": 0.002 * seconds,
        "wall_seconds": seconds,
    }


def trained_lines(shipped: Sequence[Line], seed: int = 0) -> Iterator[Line]:
    """Yields the lines that a trainer writes for these steps, without `run_id`, which stands first in its file."""
    generator = np.random.default_rng([seed, 1])
    noise_SN = generator.standard_normal((len(shipped), 4))
    for before, noise_N in zip(shipped, noise_SN, strict=True):
        loss, entropy, mismatch, norm = (float(value) for value in np.exp(0.2 * noise_N))
        decay = 0.4 + 0.6 / (1 + before["step"] / 500)
        means = {
            "loss": -0.05 * loss,
            "entropy": 0.9 * decay * entropy,
            "mismatch_kl": 2e-4 * mismatch,
            "importance_ratio/mean": 1.0,
            "masked_share": 0.001,
            "replayed_share": 1.0,
            "importance_ratio/max": 1.5 + 0.1 * mismatch,
            "tokens/trained": before["tokens/completion"],
        }
        train_seconds = 0.6 * before["wall_seconds"]
        yield {
            "step": before["step"],
            "time": before["time"] + train_seconds,
            "learning_rate": 1e-5,
            "grad_norm": 0.3 * norm,
            **means,
            **{_named(name, environment): value for environment in ENVIRONMENTS for name, value in means.items()},
            "tokens": before["batch/tokens"],
            "samples": before["batch/samples"],
            "tokens_per_second": before["batch/tokens"] / train_seconds,
            "phase/train": train_seconds,
            "phase/wait": before["wall_seconds"] - train_seconds - 0.1,
            "phase/broadcast": 0.1,
        }


def _named(name: str, environment: str) -> str:
    """The name of a metric for one environment, as `counterpoint/trainer/work/step.py` puts it."""
    metric, slash, statistic = name.partition("/")
    if name == "tokens/trained":
        return f"{name}/{environment}"
    return f"{metric}/{environment}{slash}{statistic}"


def _slow_spot(seconds: float) -> Line:
    return {
        "kind": "callback",
        "function": "Grader.score",
        "file": "tasks/grader.py",
        "line": 41,
        "inside": "JSONEncoder.iterencode",
        "callback": "_play",
        "thread": "",
        "seconds": seconds,
        "worst": seconds,
        "count": 1,
    }


def _encoded(line: Line) -> bytes:
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def _write_trained(path: Path, run_ids: Sequence[str], shipped: Sequence[Sequence[Line]], seed: int) -> None:
    """Writes the steps of all runs, side by side as they are trained."""
    parts = [[_encoded(line)[1:] for line in trained_lines(lines, seed + n)] for n, lines in enumerate(shipped)]
    heads = [b'{"run_id":"%s",' % run_id.encode() for run_id in run_ids]
    with path.open("wb", buffering=2**22) as file:
        for step in range(len(parts[0])):
            file.writelines(head + parts[number % len(parts)][step] for number, head in enumerate(heads))


def _write_configurations(directory: Path, run_ids: Sequence[str], steps: int) -> None:
    """Writes each run's `control/orch.toml`, and `job.json`."""
    environments: list[Any] = [{"name": name, "kind": name} for name in ENVIRONMENTS]
    config = RunConfig(output_dir=directory, model="tiny-moe", steps=steps, environments=environments)
    table = config.model_dump(mode="json", exclude_none=True)
    text = tomli_w.dumps({**table, "run_id": "@"})
    for run_id in run_ids:
        control = directory / f"run_{run_id}" / "control"
        control.mkdir()
        (control / "orch.toml").write_text(text.replace('"@"', f'"{run_id}"', 1))
    runs = [{**table, "run_id": run_id} for run_id in run_ids]
    job = {"output_dir": str(directory), "model": "tiny-moe", "backend": "local", "stay": False}
    (directory / JOB_FILE).write_bytes(orjson.dumps({**job, "orchestrator": table, "runs": runs}))


def _write_processes(directory: Path, run_ids: Sequence[str], state: State) -> None:
    """Writes a `processes.json` by which the job is running, or stopped."""
    of_worker, pid = (State.READY, os.getpid()) if state is State.RUNNING else (State.STOPPED, None)
    names = ["inference_0", "trainer", *(f"orchestrator_{run_id}" for run_id in run_ids)]
    workers = [WorkerView(name, of_worker, time.time(), pid, "", log_from=0, node="node-0") for name in names]
    ProcessesFile(directory).write(state, workers)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--distinct", type=int, default=16, help="runs with contents of their own")
    given = parser.parse_args()
    began = time.monotonic()
    write_job(given.directory, given.runs, given.steps, distinct=given.distinct)
    print(f"{given.directory}: {given.runs} runs of {given.steps} steps in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
