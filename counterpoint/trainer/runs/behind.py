"""Refuses to begin behind a run: without a checkpoint that its orchestrator's batches can follow.

So begins a trainer whose disk is lost, or not mounted, or restored from an older state. Beginning would remove later weights and
metrics lines, which nobody could make again, and end the orchestrator, which no longer has the batches.
"""

from __future__ import annotations

from pathlib import Path

from counterpoint.inference.checkpoint import is_delta
from counterpoint.run.trainer_files import checkpoints_directory
from counterpoint.trainer.runs import checkpoint
from counterpoint.trainer.runs.control_files import run_directory
from counterpoint.trainer.runs.run import Run
from counterpoint.transport.files.atomic import published_steps


def refusal(output_dir: Path, run: Run, durable: int) -> str | None:
    """Returns why a run must not begin at its step, and the way out; None if nothing is against it.

    `durable` is the last step whose batch the run's orchestrator cannot send again.
    """
    step, run_id = run.progress.step, run.run_id
    if step >= durable:
        return None
    directory = checkpoints_directory(output_dir, run_id)
    found = f"the newest checkpoint in {directory} is of step {step}" if step else f"{directory} has no checkpoint"
    aside = [path for path in checkpoint.were_set_aside(output_dir, run_id) if _holds(path, durable)]
    back = f"move {aside[-1]} to {directory.parent}" if aside else f"mount or restore {directory.parent}"
    return (
        f"{found}, and the run's batches up to step {durable} are gone, since a trainer had reported them durable. Nothing was "
        f"removed. To continue this run, {back}, and resume its orchestrator.{_way_on(output_dir, run)}"
    )


def _holds(former: Path, durable: int) -> bool:
    return max(published_steps(former / "checkpoints"), default=0) >= durable


def _way_on(output_dir: Path, run: Run) -> str:
    """Returns how another run goes on from the newest weights that are published and whole."""
    published = run_directory(output_dir, run.run_id) / "broadcast"
    versions = [published / f"step_{version}" for version in reversed(published_steps(published))]
    newest = next((path for path in versions if not is_delta(path)), None)
    if newest is None:
        return ""
    if run.config.training.lora is None:
        return (
            f' If that is lost, begin another job with model = "{newest}": the newest whole weights that are published'
        )
    return f' If that is lost, begin another run with training.lora.start_from = "{newest}": the newest adapter that is published'
