"""The state of a run: how much of its work is done, whether it is alive, and how it ended."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from counterpoint.cluster.worker_view import ENDED, State, WorkerView
from counterpoint.job.directory import is_running, orchestrator_of
from counterpoint.job.reading.metrics.history import History
from counterpoint.orchestrator.evaluation.lines import evaluated_steps
from counterpoint.run.config import RunConfig
from counterpoint.run.pause import read_pause
from counterpoint.run.trainer_files import checkpoints_directory
from counterpoint.trainer.runs.control_files import MAX_REASON_BYTES
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.files.untrusted import UntrustedFileError, read_text

FINE_TUNING_FILE = "sft.json"
"""The file in the directory of a run that trains on data (`counterpoint/trainer/sft/train.py`), whose steps no orchestrator
makes."""


MAX_CONFIGURATION_BYTES = 2**20
"""Of a run's configuration."""

_DRIVEN = re.compile(r"^driven = true$", re.MULTILINE)


def committed_steps(run: RunConfig) -> int:
    """Returns the newest step that the orchestrator has committed, 0 before the first."""
    return max(published_steps(run.run_dir / "checkpoints"), default=0)


def all_committed(run: RunConfig) -> bool:
    """Returns whether the orchestrator has committed every step and evaluated the last one.

    The trainer may still lack some; inference is not needed.
    """
    evaluated = evaluated_steps(run.run_dir)
    return committed_steps(run) >= run.steps and all(
        evaluated.get(evaluation.name, -1) >= run.steps for evaluation in run.evaluations
    )


def is_finished(run: RunConfig) -> bool:
    """Returns whether no work is left: every step is committed, in the metrics, trained and durable, and its batch deleted."""
    durable = max(published_steps(checkpoints_directory(run.output_dir, run.run_id)), default=0)
    history = History.of(run.output_dir, run.run_id)
    history.refresh()
    return (
        all_committed(run)
        and durable >= run.steps
        and history.step >= run.steps
        and not any(run.run_dir.glob("rollouts/step_*/batch.bin"))
    )


def outcome_of_run(run: RunConfig, history: History, worker: WorkerView | None) -> str:
    """Describes how one of the job's own runs ended, once the job is over. `worker` is None for a run that was not started."""
    if (exclusion := exclusion_of(run.run_dir)) is not None:
        return exclusion
    if is_finished(run):
        return "done"
    if worker is not None and worker.state is State.FAILED:
        return f"failed: {worker.last_death or 'killed while it was being stopped'}"
    return f"stopped after step {history.step}"


def outcome_of_guest(output_dir: Path, history: History) -> str:
    """Describes how a guest ended, or that it still runs, once the job is over."""
    if orchestrator_of(output_dir, history.run_id) is not None:
        return "waits for the job's return"
    if (exclusion := exclusion_of(output_dir / f"run_{history.run_id}")) is not None:
        return exclusion
    return "done" if history.complete else f"stopped after step {history.step}"


def is_to_start(run_id: str, workers: Iterable[Mapping[str, Any]]) -> bool:
    """Returns whether a job that is running will start the orchestrator of one of its own runs, if that is not alive.

    `workers` are those of `processes.json`. The worker of an only run has no run's name.
    """
    names = (f"orchestrator_{run_id}", "orchestrator")
    return any(worker["name"] in names and worker["state"] not in ENDED for worker in workers)


def current_state(
    output_dir: Path, history: History, is_guest: bool, is_to_start: bool = False, obstacle: str = ""
) -> str:
    """Describes in a word or two whether the run is alive, and if not, why.

    `is_to_start` says that its orchestrator will be started: once servers and trainer are ready, or again after its death.
    `obstacle` is what keeps a living run from its work (`counterpoint/job/reading/activity/fleet.py`).
    """
    exclusion = exclusion_of(output_dir / f"run_{history.run_id}")
    if orchestrator_of(output_dir, history.run_id) is not None:
        begun = (obstacle or "running") if history.step or exclusion else "before its first step"
        begun = begun if read_pause(output_dir / f"run_{history.run_id}") is None else "paused"
        return f"{begun}, guest" if is_guest else begun
    if exclusion is not None:
        return exclusion.partition(":")[0]
    if (output_dir / f"run_{history.run_id}" / FINE_TUNING_FILE).exists():
        # There is no orchestrator. The command has the directory's lock.
        if history.steps and max(history.trained, default=0) >= history.steps:
            return "done"
        return "running" if is_running(output_dir) else "unfinished"
    if history.complete:
        return "done"
    if is_driven(output_dir / f"run_{history.run_id}"):
        return "driven" if is_running(output_dir) else "not running"
    return "starting" if is_to_start else "not running"


def is_driven(run_dir: Path) -> bool:
    """Returns whether others than an orchestrator ask for a run's steps, such as clients of the service for the Tinker SDK."""
    try:
        return _DRIVEN.search(read_text(run_dir / "control" / "orch.toml", MAX_CONFIGURATION_BYTES)) is not None
    except (OSError, UntrustedFileError):
        return False


def exclusion_of(run_dir: Path) -> str | None:
    """Returns why the trainer may not train the run: `evicted: REASON` or `refused: REASON`; None if it may."""
    for word, name in (("evicted", "evicted.txt"), ("refused", "config_validation_error.txt")):
        try:
            reason = read_text(run_dir / "control" / name, MAX_REASON_BYTES).strip() or "no reason given"
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, UntrustedFileError) as error:
            reason = str(error)
        return f"{word}: {reason}"
    return None


def eviction_of(run: RunConfig) -> str | None:
    """Returns a sentence on an evicted run: why, and what has to go before it is resumed; None if it is not evicted."""
    exclusion = exclusion_of(run.run_dir)
    if exclusion is None or not exclusion.startswith("evicted"):
        return None
    return (
        f"run {run.run_id!r} was {exclusion}; before it is resumed, remove the cause, and then "
        f"{run.run_dir / 'control' / 'evicted.txt'}"
    )


def evictions_of_all_left(runs: Sequence[RunConfig]) -> list[str]:
    """Returns the sentences of `eviction_of` on the runs that have work left, if all of them are evicted; else none."""
    evictions = {run.run_id: eviction for run in runs if (eviction := eviction_of(run)) is not None}
    left = [run.run_id for run in runs if evictions and not is_finished(run)]
    return [evictions[run_id] for run_id in left] if evictions.keys() >= {*left} else []
