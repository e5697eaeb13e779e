"""How far a run in a job's directory has come, as a resume would find it, and how it stands with the trainer: what is left to do
decides what is started, and what is said at the end."""

from __future__ import annotations

from pathlib import Path

from cluster.events import State
from cluster.job import WorkerView
from job.directory import orchestrator_of
from job.history import History
from run.config import RunConfig
from trainer.runs.control_files import MAX_REASON_BYTES
from transport.files.atomic import published_steps
from transport.files.untrusted import UntrustedFileError, read_text


def all_committed(run: RunConfig) -> bool:
    """Whether the orchestrator has committed every step. What is left then is the trainer's, and needs no inference."""
    return max(published_steps(run.run_dir / "checkpoints"), default=0) >= run.steps


def is_finished(run: RunConfig) -> bool:
    """Whether nothing is left to do: every step committed, in the metrics, trained and durable, its batch deleted."""
    durable = max(published_steps(run.output_dir / "trainer" / run.run_id / "checkpoints"), default=0)
    history = History.of(run.output_dir, run.run_id)
    history.refresh()
    return (
        all_committed(run)
        and durable >= run.steps
        and history.step >= run.steps
        and not any(run.run_dir.glob("rollouts/step_*/batch.bin"))
    )


def how_it_ended(run: RunConfig, history: History, worker: WorkerView | None) -> str:
    """For a person: how a run of a job that is over has ended. `worker` is None for one that was not started."""
    if (verdict := verdict_on(run.run_dir)) is not None:
        return verdict
    if is_finished(run):
        return "done"
    if worker is not None and worker.state is State.FAILED:
        return f"failed: {worker.last_death or 'killed while it was being stopped'}"
    return f"stopped after step {history.step}"


def how_a_guest_stands(output_dir: Path, history: History) -> str:
    """For a person, when the job is over: how a run stands that others have started."""
    if orchestrator_of(output_dir, history.run_id) is not None:
        return "waits for the job's return"
    if (verdict := verdict_on(output_dir / f"run_{history.run_id}")) is not None:
        return verdict
    return "done" if history.complete else f"stopped after step {history.step}"


def verdict_on(run_dir: Path) -> str | None:
    """Why the run may not go on, `evicted: ...` or `refused: ...`; None where nothing speaks against it."""
    for word, name in (("evicted", "evicted.txt"), ("refused", "config_validation_error.txt")):
        try:
            reason = read_text(run_dir / "control" / name, MAX_REASON_BYTES).strip() or "no reason given"
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, UntrustedFileError) as error:
            reason = str(error)
        return f"{word}: {reason}"
    return None
