"""Begins a run with the state of another one after a step: weights, optimizer, schedule, position in the data, early warnings.

The new run's directory gets the other's checkpoints of that step under its own name, so that its roles resume it. The
trainer's is linked, and so is the orchestrator's (`counterpoint/trainer/taken_over.py`,
`orchestrator/step/checkpoint.py`). Changes that were in force at the step are in the new run's configuration, besides those
asked for. `branch.json`, written last, says where the run comes from. The new run is of the same job, or of one of its own in
another directory (`counterpoint/job/branch/own_job.py`), which gets copies where links cannot reach.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import orjson

from counterpoint.job.admin.ask import Refused
from counterpoint.job.admin.join import Joined, join_run
from counterpoint.job.branch.batches import first_step_with, write_batch
from counterpoint.job.branch.configuration import branched_config, check_later, given_config
from counterpoint.job.branch.kept import KeptSteps, StepNotKept, kept_of
from counterpoint.job.branch.own_job import file_of, job_of_its_own
from counterpoint.job.configuration.load import to_toml
from counterpoint.job.directory import is_running
from counterpoint.job.reading.metrics.trained_lines import METRICS_FILE
from counterpoint.job.write_job import write_job
from counterpoint.orchestrator.step import checkpoint
from counterpoint.run.branches import BRANCH_FILE, BranchOrigin
from counterpoint.run.changes import LEARNING_RATE, Change, LearningRates, write_journal
from counterpoint.run.config import RunConfig
from counterpoint.run.receipts import RECEIPTS_FILE, head_of
from counterpoint.run.trainer_files import checkpoints_directory, start_directory
from counterpoint.trainer.taken_over import linked, take_over
from counterpoint.transport.errors import CheckpointError, UserError
from counterpoint.transport.files.atomic import remove_directory, write_atomically
from counterpoint.transport.files.json_lines import append_bytes, read_lines

_UNFINISHED = ".branching"
"""Marks the directory of a branch that is being prepared, or was when a kill came. It says nothing beside `BRANCH_FILE`."""


def branch(
    job: Path,
    run_id: str,
    step: int | None,
    name: str,
    changes: Mapping[str, str],
    without: Sequence[str] = (),
    into: Path | None = None,
) -> RunConfig:
    """Prepares the directory of run `name`, which goes on from `step` of a run of the job (its newest kept step, if None).

    `changes` are texts by dotted key, as a command's flags have them. Rollouts, examples and environments in `without` are left
    out of recorded batches, which are trained again from the first step that has one. Steps before the oldest of these keep what
    they had of it, and the branch plays it on. Returns the new run's configuration, whose `resume` is set; `start` has it join
    the job. With `into`, it is the only run of a job of its own in that directory, which is made and must have nothing in it. A
    preparation that was killed is made anew.

    Raises `NotThere` for a run that does not exist, `StepNotKept`, `Refused` for a name that is taken or a key that cannot be
    another, `UserError` for a wrong value or nothing to leave out, and `OSError`.
    """
    kept = kept_of(job, run_id)
    step = kept.check(step)
    config = branched_config(job, run_id, step, name, changes, into or job)
    trained = _trained_step(job, kept, step, without, config.transport.largest_batch)
    oldest = kept.starts(step)[0] + 1
    if trained < step:
        check_later(changes, trained, step)
    source, own = job / f"run_{run_id}", None
    if into is not None:
        _check_empty(config, job)
        own = job_of_its_own(job, config, trained, changes)
    origin = BranchOrigin(
        job=None if own is None else str(job.absolute()),
        run=run_id,
        step=step,
        trained=trained,
        changes=dict(changes),
        without=list(without),
        without_from=oldest if without else None,
        head=_head_at(source, step),
    )
    with _prepared(config) as run_dir:
        _take_state(job, kept, origin, config)
        _journal_rates(source, origin, config)
        if own is None:
            write_atomically(run_dir / "branch.toml", to_toml(config).encode())
        else:
            write_job(own, file_of(own))
            _take_lines(job, origin, config)
        write_atomically(run_dir / BRANCH_FILE, orjson.dumps(origin.model_dump()))
    return config


def _trained_step(job: Path, kept: KeptSteps, step: int, without: Sequence[str], largest: int) -> int:
    """Returns the step of the trainer's checkpoint to go on from: the newest one, or that before all that is left out.

    0 is the run's beginning.
    """
    starts = kept.starts(step)
    if not without:
        return starts[-1]
    again = {each: kept.batches[each] for each in range(starts[0] + 1, step + 1)}
    first = first_step_with(job, kept.run_id, again, without, largest)
    return max(each for each in starts if each < first)


def start(job: Path, config: RunConfig) -> Joined:
    """Has a branch join its live job, beside the run that it comes from. Raises as `join_run`."""
    return join_run(job, to_toml(config), name=f"the file of branch {config.run_id}", resume=True)


def _check_empty(config: RunConfig, job: Path) -> None:
    """Raises `Refused` if the new job's directory is within `job`, or has something in it.

    What a kill left of the same branch may be there.
    """
    directory, was_killed = config.output_dir, _was_killed(config)
    if directory.resolve().is_relative_to(job.resolve()):
        raise Refused(f"--into {directory}: it is within the job in {job}; name a new directory beside that")
    if not directory.is_dir() or (was_killed and any(config.run_dir.iterdir())):
        return
    for found in directory.iterdir():
        if found != config.run_dir or not was_killed:
            raise Refused(f"--into {directory}: it has something in it, such as {found.name}; name a new directory")


def _was_killed(config: RunConfig) -> bool:
    """Whether a kill left the run's directory: with the mark, or, before that was made, with nothing."""
    names = {each.name for each in config.run_dir.iterdir()} if config.run_dir.is_dir() else {BRANCH_FILE}
    return BRANCH_FILE not in names and (_UNFINISHED in names or not (names or _trained(config).exists()))


def _trained(config: RunConfig) -> Path:
    return config.output_dir / "trainer" / config.run_id


@contextmanager
def _prepared(config: RunConfig) -> Iterator[Path]:
    """Yields the branch's directory, which is one once the block ends. Raises `Refused` if the name is taken."""
    run_dir, trained = config.run_dir, _trained(config)
    was_killed = _was_killed(config)
    if not was_killed and (run_dir.exists() or trained.exists()):
        raise Refused(
            f"there is a run {config.run_id} already in {config.output_dir}; choose another name for the branch"
        )
    for directory in (run_dir, trained) if was_killed else ():
        remove_directory(directory)
    run_dir.mkdir(parents=True)
    (run_dir / _UNFINISHED).touch()
    yield run_dir
    (run_dir / _UNFINISHED).unlink()


def _take_state(job: Path, kept: KeptSteps, origin: BranchOrigin, config: RunConfig) -> None:
    run_id, source, step, begun = origin.run, job / f"run_{origin.run}", origin.step, start_directory(job, origin.run)
    trained = checkpoints_directory(config.output_dir, config.run_id) / f"step_{origin.trained}"
    try:
        checkpoint.take_over(source / "checkpoints" / f"step_{step}", config)
        for again in range(origin.trained + 1, step + 1):
            target, largest = config.run_dir / "rollouts" / f"step_{again}", config.transport.largest_batch
            write_batch(job, run_id, kept.batches[again], target, config.run_id, origin.without, largest)
        # The trainer's later: a trainer that starts sets those aside of which there is no run.
        if origin.trained:
            take_over(kept.trained[origin.trained], trained, run_id, origin.trained)
        if begun.is_dir():
            with linked(begun, start_directory(config.output_dir, config.run_id)):
                pass
    except (FileNotFoundError, CheckpointError) as error:
        raise StepNotKept(f"step {step} of run {run_id} was removed meanwhile, or is damaged: {error}") from None
    except ValueError as error:
        raise UserError(f"what the trainer has kept of run {run_id} cannot be used: {error}") from None
    before = (raw for raw, line in read_lines(source / "metrics.jsonl") if line.get("step", step + 1) <= step)
    append_bytes(config.run_dir / "metrics.jsonl", b"".join(before), durable=True)


def _take_lines(job: Path, origin: BranchOrigin, config: RunConfig) -> None:
    """Gives the new job's trainer the metrics of the steps that the runs have in common, as the branch's own."""
    common = (
        {**line, "run_id": config.run_id}
        for _, line in read_lines(job / METRICS_FILE)
        if line.get("run_id") == origin.run and line.get("step", origin.trained + 1) <= origin.trained
    )
    write_atomically(config.output_dir / METRICS_FILE, b"".join(orjson.dumps(line) + b"\n" for line in common))


def _journal_rates(source: Path, origin: BranchOrigin, config: RunConfig) -> None:
    """Has the steps that are trained again the learning rates that they had: the branch's own begins after them."""
    own, rates, journal = config.training.learning_rate, LearningRates(source), list[Change]()
    steps = [*range(origin.trained + 1, origin.step + 1), origin.step + 1]
    before = given_config(source.parent, origin.run).training.learning_rate
    for step in steps:
        rate = own if step > origin.step else rates.at(step) or before
        if rate != (journal[-1].changes[LEARNING_RATE] if journal else own):
            values = {"changes": {LEARNING_RATE: rate}, "given": {LEARNING_RATE: own}}
            journal.append(Change(request_id=f"branch-{step}", step=step, **values))
    if journal:
        (config.run_dir / "control").mkdir()
        write_journal(config.run_dir, journal)


def _head_at(run_dir: Path, step: int) -> str:
    receipts = read_lines(run_dir / RECEIPTS_FILE)
    return next((head_of(raw) for raw, line in receipts if line.get("step") == step), "")


def start_words(job: Path, config: RunConfig) -> str:
    """Returns how to start a branch of `job` that does not run."""
    if config.output_dir != job.absolute():
        return f"counterpoint run {shlex.quote(str(config.output_dir / 'job.toml'))} --resume"
    return (
        f"counterpoint orchestrator {config.run_dir / 'branch.toml'} --join {job} --resume"
        if is_running(job)
        else "start the job with --resume, and with --stay true if its own runs are done, and then counterpoint orchestrator "
        f"{config.run_dir / 'branch.toml'} --join {job}"
    )
