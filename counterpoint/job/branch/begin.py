"""Begins a run with the state of another one after a step: weights, optimizer, schedule, position in the data, early warnings.

The new run's directory gets the other's checkpoints of that step under its own name, so that its roles resume it. The
trainer's is linked, and so is the orchestrator's (`counterpoint/trainer/taken_over.py`,
`orchestrator/step/checkpoint.py`). Changes that were in force at the step are in the new run's configuration, besides those
asked for. `branch.json`, written last, says where the run comes from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from counterpoint.job.admin.ask import NotThere, Refused, run_directory
from counterpoint.job.admin.join import Joined, join_run
from counterpoint.job.configuration.layers import read_flags
from counterpoint.job.configuration.load import merge, to_toml
from counterpoint.job.directory import is_running, written_config
from counterpoint.orchestrator.step import checkpoint
from counterpoint.run.changes import apply, in_force, read_journal, without_removed
from counterpoint.run.config import RunConfig
from counterpoint.run.receipts import RECEIPTS_FILE, head_of
from counterpoint.trainer.taken_over import (
    DESCRIPTION,
    durable_directories,
    link_directory,
    start_directory,
    take_over,
)
from counterpoint.transport.config import Config, Identifier
from counterpoint.transport.configuration.explain import Layer, validate
from counterpoint.transport.configuration.schema import keys_of
from counterpoint.transport.configuration.toml_file import Table, anchored
from counterpoint.transport.errors import CheckpointError, UserError
from counterpoint.transport.files.atomic import published_steps, remove_directory, write_atomically
from counterpoint.transport.files.json_lines import append_bytes, read_lines
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json

BRANCH_FILE = "branch.json"
"""The file with the `BranchOrigin`, in the directory of a run that is a branch."""

FORMAT = 1

_MAX_BYTES = 2**20

_UNFINISHED = ".branching"
"""Marks the directory of a branch that is being prepared, or was when a kill came. It says nothing beside `BRANCH_FILE`."""

FIXED = (
    "output_dir", "run_id", "model", "served_model", "seed", "driven", "training.optimizer", "training.start_from",
    "training.lora.rank", "training.lora.alpha", "training.lora.target_modules", "training.value_head",
)  # fmt: skip
"""Keys that no branch has other values of: its weights and its order of examples would be another run's."""


class StepNotKept(UserError):
    """The run has no longer, or not yet, what is needed to go on from that step."""

    code = 3


class BranchOrigin(Config, frozen=True):
    """Where a branch comes from."""

    format: int = FORMAT
    run: Identifier
    """The run that it goes on from."""
    step: int
    """The last step that it has in common with that run."""
    changes: dict[str, str] = {}
    """The keys that were asked to be other values, by dotted key, as they were written."""
    head: str = ""
    """The hash of the other run's receipt of that step; empty if it has none."""


def origin_of(run_dir: Path) -> BranchOrigin | None:
    """Returns where the run in a directory comes from; None if it is no branch. Raises `UserError` for a damaged file."""
    try:
        return BranchOrigin.model_validate(read_json(run_dir / BRANCH_FILE, _MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{run_dir / BRANCH_FILE} cannot be read: {error}") from None


def kept_steps(job: Path, run_id: str) -> list[int]:
    """Returns the steps that a run can go on from, ascending. Raises `NotThere`."""
    committed = published_steps(run_directory(job, run_id) / "checkpoints")
    return sorted({*committed} & {*durable_directories(job, run_id)})


def branch(job: Path, run_id: str, step: int | None, name: str, changes: Mapping[str, str]) -> RunConfig:
    """Prepares the directory of run `name`, which goes on from `step` of a run of the same job (its newest kept step, if None).

    `changes` are texts by dotted key, as a command's flags have them. Returns the new run's configuration, whose `resume` is set;
    `start` has it join the job. A preparation that was killed is made anew.

    Raises `NotThere` for a run that does not exist, `StepNotKept`, `Refused` for a name that is taken or a key that cannot be
    another, `UserError` for a wrong value, and `OSError`.
    """
    kept = kept_steps(job, run_id)
    if not kept or step not in (None, *kept):
        asked = f"step {step} of run {run_id} was not kept" if kept else f"no step of run {run_id} is kept"
        raise StepNotKept(f"{asked}: {_kept_words(job, run_id, kept)}")
    step = kept[-1] if step is None else step
    config = branched_config(job, run_id, step, name, changes)
    with _prepared(config, run_id) as run_dir:
        _take_state(job, run_id, step, config)
        origin = BranchOrigin(run=run_id, step=step, changes=dict(changes), head=_head_at(job / f"run_{run_id}", step))
        write_atomically(run_dir / "branch.toml", to_toml(config).encode())
        write_atomically(run_dir / BRANCH_FILE, orjson.dumps(origin.model_dump()))
    return config


def start(job: Path, config: RunConfig) -> Joined:
    """Has a branch join its live job, beside the run that it comes from. Raises as `join_run`."""
    return join_run(job, to_toml(config), name=f"the file of branch {config.run_id}", resume=True)


def branched_config(job: Path, run_id: str, step: int, name: str, changes: Mapping[str, str]) -> RunConfig:
    """Returns the configuration of a branch: the other run's, as in force at the step, with changes.

    Raises `Refused` for a key that cannot be another, and `UserError` for an unknown one or a wrong value.
    """
    if not (written := written_config(job, run_id)):
        raise NotThere(f"run {run_id} has not begun, or its control/orch.toml cannot be read")
    try:
        given = RunConfig.model_validate(written)
        journal = without_removed(given, read_journal(run_directory(job, run_id)))
        before = apply(given, in_force(journal, step)).table()
    except ValueError as error:
        raise UserError(f"the configuration of run {run_id} cannot be read: {error}") from None
    flags = [f"--{key}={value}" for key, value in changes.items()]
    flagged = anchored(read_flags(RunConfig, keys_of(RunConfig), flags), Path.cwd())
    after = merge(before, flagged)
    _check_fixed(run_id, before, after, changes)
    own = {**after, "run_id": name, "resume": True, "output_dir": str(job.absolute())}
    return validate(RunConfig, own, f"run {run_id}", [Layer(flagged, lambda path: path)])


def _check_fixed(run_id: str, before: Table, after: Table, changes: Mapping[str, str]) -> None:
    """Raises `Refused` for a change of `FIXED`, or of which environments there are."""
    wrong = [key for key in FIXED if key in changes or _at(before, key) != _at(after, key)]
    one, other = ([(each["name"], each["kind"]) for each in table["environments"]] for table in (before, after))
    wrong += ["environments"] * (one != other)
    if wrong:
        raise Refused(
            f"{wrong[0]} cannot be another in a branch of run {run_id}: its weights and its order of examples are those of that "
            "run; begin a run of its own"
        )


def _at(table: Any, key: str) -> Any:
    for name in key.split("."):
        table = table.get(name) if isinstance(table, dict) else None
    return table


@contextmanager
def _prepared(config: RunConfig, run_id: str) -> Iterator[Path]:
    """Yields the branch's directory, which is one once the block ends. Raises `Refused` if the name is taken."""
    run_dir, trained = config.run_dir, config.output_dir / "trainer" / config.run_id
    unfinished = run_dir / _UNFINISHED
    was_killed = unfinished.exists() and not (run_dir / BRANCH_FILE).exists()
    if not was_killed and (run_dir.exists() or trained.exists()):
        raise Refused(
            f"there is a run {config.run_id} already in {config.output_dir}; choose another name for the branch"
        )
    for directory in (run_dir, trained) if was_killed else ():
        remove_directory(directory)
    run_dir.mkdir()
    unfinished.touch()
    yield run_dir
    unfinished.unlink()


def _take_state(job: Path, run_id: str, step: int, config: RunConfig) -> None:
    source, directory = job / f"run_{run_id}", durable_directories(job, run_id)[step]
    try:
        checkpoint.take_over(source / "checkpoints" / f"step_{step}", config)
        # The trainer's second: a trainer that starts sets those aside of which there is no run.
        take_over(directory, job / "trainer" / config.run_id / "checkpoints" / f"step_{step}", run_id=config.run_id)
        if (begun := start_directory(job, run_id)).is_dir():
            link_directory(begun, start_directory(job, config.run_id))
    except (FileNotFoundError, CheckpointError) as error:
        raise StepNotKept(f"step {step} of run {run_id} was removed meanwhile, or is damaged: {error}") from None
    except UntrustedFileError as error:
        raise UserError(f"{directory / DESCRIPTION} cannot be read: {error}") from None
    before = (raw for raw, line in read_lines(source / "metrics.jsonl") if line.get("step", step + 1) <= step)
    append_bytes(config.run_dir / "metrics.jsonl", b"".join(before), durable=True)


def _head_at(run_dir: Path, step: int) -> str:
    receipts = read_lines(run_dir / RECEIPTS_FILE)
    return next((head_of(raw) for raw, line in receipts if line.get("step") == step), "")


def _kept_words(job: Path, run_id: str, kept: Sequence[int]) -> str:
    if kept:
        return f"it can go on from {', '.join(map(str, kept))}; keep_every keeps more"
    committed = published_steps(run_directory(job, run_id) / "checkpoints")
    return (
        f"its orchestrator has checkpoints of steps {committed or 'none'}, its trainer of "
        f"{list(durable_directories(job, run_id)) or 'none'}, and both are needed of one; keep_every keeps them"
    )


def start_words(job: Path, config: RunConfig) -> str:
    """Returns how to start a branch whose job does not run."""
    return (
        f"counterpoint orchestrator {config.run_dir / 'branch.toml'} --join {job} --resume"
        if is_running(job)
        else f"start the job with --resume, and then counterpoint orchestrator {config.run_dir / 'branch.toml'} --join {job}"
    )
