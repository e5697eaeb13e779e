"""The recorded batches that a branch trains again, under its own name and without what is to be left out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from counterpoint.job.branch.kept import StepNotKept
from counterpoint.job.reading.rollouts.rollout_records import read_records
from counterpoint.run.batch_files import BATCH_FILE, batch_file
from counterpoint.trainer.work.batch_parts import part
from counterpoint.transport import codec
from counterpoint.transport.arrays import CodecError
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import publish_directory
from counterpoint.transport.files.links import link_file
from counterpoint.transport.records import Batch

RECORDS = ("rollouts.jsonl", "tokens.bin")


def read_batch(path: Path, largest: int) -> Batch:
    """Reads a recorded batch. Raises `StepNotKept` if it is gone, and `UserError` if it is damaged."""
    try:
        return codec.read_file(batch_file(path.parent), largest)  # it may have become a kept one since
    except FileNotFoundError:
        raise StepNotKept(f"{path} was removed meanwhile") from None
    except (CodecError, OSError) as error:
        raise UserError(f"a batch to train again cannot be read: {error}") from None


def rollouts_of(job: Path, batch: Batch, run_id: str, without: Collection[str]) -> set[str]:
    """Returns the ids of a batch's rollouts that are named: `12-3`, `ENVIRONMENT`, or `ENVIRONMENT:EXAMPLE`."""
    found = {each.rollout_id for each in batch.samples if {each.rollout_id, each.environment} & {*without}}
    if any(":" in each for each in without):
        for record in read_records(job, run_id, batch.step):
            if f"{record.environment}:{record.example}" in without:
                found.add(record.rollout_id)
    return found & {each.rollout_id for each in batch.samples}


def first_step_with(job: Path, run_id: str, batches: Mapping[int, Path], without: Sequence[str], largest: int) -> int:
    """Returns the first step that has trained any of what is named. Raises `UserError` unless each is in some batch."""
    missing, first = {*without}, 0
    for step, path in sorted(batches.items()):
        batch = read_batch(path, largest)
        for each in without:
            if rollouts_of(job, batch, run_id, [each]):
                missing.discard(each)
                first = first or step
    if missing:
        raise UserError(
            f"--without {sorted(missing)[0]}: no rollout, environment or example (ENVIRONMENT:INDEX) of that name is in the "
            f"batches of run {run_id} that can be trained again, of steps {', '.join(map(str, sorted(batches))) or 'none'}"
        )
    return first


def write_batch(
    job: Path, run_id: str, path: Path, target: Path, name: str, without: Collection[str], largest: int
) -> None:
    """Publishes `target`, a directory in `rollouts/` of the run `name`, with the batch in `path` as its own, and the records.

    Raises `UserError` if nothing is left of the batch, `StepNotKept`, and `OSError`.
    """
    batch = read_batch(path, largest)
    left_out = rollouts_of(job, batch, run_id, without)
    kept = [index for index, each in enumerate(batch.samples) if each.rollout_id not in left_out]
    if not kept:
        raise UserError(
            f"--without {', '.join(without)}: nothing would be left of step {batch.step}, and a step trains at least one sample; "
            f"leave out less of it, or, to have that step played anew, go on from a step before it: --step {batch.step - 1}"
        )
    own = replace(part(batch, kept) if left_out else batch, run_id=name)
    with publish_directory(target) as directory:
        codec.write_file(directory / BATCH_FILE, own)
        for record in (path.with_name(each) for each in RECORDS):
            if record.is_file():
                link_file(record, directory / record.name)
