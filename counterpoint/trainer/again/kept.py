"""What a run has kept by which a step can be trained again: a checkpoint before it, and each batch from there on.

A run's own directories are only read. A learner gets a directory of its own (`lay_out`) with copies of the run's small files, and
links to the rest.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from counterpoint.run.batch_files import batch_file
from counterpoint.run.changes import JOURNAL
from counterpoint.run.trainer_files import checkpoints_directory
from counterpoint.trainer.runs import control_files
from counterpoint.trainer.taken_over import copied_steps, durable_directories, leading_to
from counterpoint.transport import codec
from counterpoint.transport.arrays import CodecError
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.files.json_lines import lines_from_end
from counterpoint.transport.files.lock import holder_of
from counterpoint.transport.records import Batch

LOCK = "orchestrator.lock"


class NotKept(UserError):
    """A step that cannot be trained again, since what it takes was not kept; the message says what is missing."""

    code = 6


class BeingWritten(UserError):
    """An orchestrator writes the run now."""

    code = 4


@dataclass(frozen=True, slots=True)
class Kept:
    """A step of a run that can be trained again."""

    output_dir: Path
    """The job's directory."""
    run_id: str
    step: int
    first: int
    """The step of the checkpoint to begin with; 0: with the run's beginning."""
    max_batch_bytes: int

    def batch(self, step: int) -> Batch:
        """Reads the batch of a step. Raises `NotKept`."""
        path = _batch_file(self.output_dir, self.run_id, step)
        try:
            batch = codec.read_file(path, self.max_batch_bytes)
        except (OSError, CodecError) as error:
            raise NotKept(f"the batch of step {step} cannot be read: {error}") from error
        if (batch.run_id, batch.step) != (self.run_id, step):
            raise NotKept(f"{path} is the batch of step {batch.step} of run {batch.run_id!r}, not of step {step}")
        return batch

    def lay_out(self, directory: Path) -> None:
        """Makes `directory` one in which a learner finds the run at its first step. Raises `OSError`."""
        control = control_files.run_directory(directory, self.run_id) / "control"
        control.mkdir(parents=True)
        for name in ("orch.toml", JOURNAL):
            if (file := control_files.run_directory(self.output_dir, self.run_id) / "control" / name).exists():
                shutil.copyfile(file, control / name)
        own, other = directory / "trainer" / self.run_id, self.output_dir.absolute() / "trainer" / self.run_id
        checkpoints = checkpoints_directory(directory, self.run_id)
        checkpoints.mkdir(parents=True)
        if self.first:
            found = durable_directories(self.output_dir, self.run_id)[self.first]
            (checkpoints / f"step_{self.first}").symlink_to(found.absolute())
        for name in ("start", "copies"):
            if (other / name).exists():
                (own / name).symlink_to(other / name)


def metrics_line(kept: Kept) -> dict[str, Any] | None:
    """Returns the trainer's metrics line of the step; None if there is none any more."""
    for _, _, line in lines_from_end(kept.output_dir / "trainer" / "metrics.jsonl"):
        if line is not None and (line.get("run_id"), line.get("step")) == (kept.run_id, kept.step):
            return line
    return None


def find(output_dir: Path, run_id: str, step: int, max_batch_bytes: int, at_most: int | None = None) -> Kept:
    """Returns how a step can be trained again: from the newest checkpoint before it, or not above step `at_most` if there is one.

    Raises `BeingWritten`, or `NotKept` if there is no such step, or its batch or a checkpoint before it is gone.
    """
    run_dir = control_files.run_directory(output_dir, run_id)
    if (holder := holder_of(run_dir / LOCK)) is not None:
        raise BeingWritten(f"an orchestrator writes run {run_id} now (process {holder.pid}); wait until it has ended")
    trained = published_steps(run_dir / "rollouts")
    if step < 1 or (trained and step > trained[-1]):
        raise NotKept(f"run {run_id} has no step {step}: its newest is {trained[-1]}")
    batches = {each for each in {*trained, step} if _batch_file(output_dir, run_id, each).exists()}
    if step not in batches:
        raise NotKept(
            f"the batch of step {step} of run {run_id} was not kept: there is no {_batch_file(output_dir, run_id, step)}. "
            "Batches are kept from the oldest kept checkpoint of the trainer on (trainer.keep_checkpoints), and as many more as "
            "keep_batches says"
        )
    copied = copied_steps(output_dir, run_id)
    own = batches - copied.keys()
    usable = [each for each in leading_to(step, [0, *durable_directories(output_dir, run_id)], own) if each < step]
    if not usable:
        lacking = max(each for each in range(1, step + 1) if each not in own)
        if lacking in copied:
            raise NotKept(f"step {lacking} of run {run_id} was not trained: {copied[lacking]}")
        raise NotKept(
            f"step {step} of run {run_id} cannot be trained again: the batch of step {lacking} was not kept, nor a checkpoint "
            "of the trainer from that step on (trainer.keep_checkpoints)"
        )
    early = [each for each in usable if at_most is None or each <= at_most]
    return Kept(output_dir, run_id, step, early[-1] if early else usable[0], max_batch_bytes)


def _batch_file(output_dir: Path, run_id: str, step: int) -> Path:
    return batch_file(control_files.run_directory(output_dir, run_id) / "rollouts" / f"step_{step}")
