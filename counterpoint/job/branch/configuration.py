"""The configuration of a branch: the other run's as in force at the step, with changes that leave its weights and order alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from counterpoint.job.admin.ask import NotThere, Refused, run_directory
from counterpoint.job.branch.kept import StepNotKept
from counterpoint.job.configuration.layers import read_flags
from counterpoint.job.configuration.load import merge
from counterpoint.job.directory import written_config
from counterpoint.run.changes import LEARNING_RATE, apply, given_overlong, in_force, read_journal, without_removed
from counterpoint.run.config import RunConfig
from counterpoint.transport.configuration.explain import Layer, validate
from counterpoint.transport.configuration.schema import keys_of
from counterpoint.transport.configuration.toml_file import Table, anchored
from counterpoint.transport.errors import UserError

FIXED = (
    "output_dir", "run_id", "model", "served_model", "seed", "driven", "training.optimizer", "training.start_from",
    "training.lora.rank", "training.lora.alpha", "training.lora.target_modules", "training.value_head",
)  # fmt: skip
"""Keys that no branch has other values of: its weights and its order of examples would be another run's."""

NOT_OF_A_STEP = (LEARNING_RATE, "training.checkpoint_interval", "training.keep_every", "training.weight")
"""Keys of `[training]` that may differ although earlier steps are trained again: their batches have the values that they had."""


def branched_config(
    job: Path, run_id: str, step: int, name: str, changes: Mapping[str, str], into: Path | None = None
) -> RunConfig:
    """Returns the configuration of a branch: the other run's, as in force at the step, with changes, in `into` or else `job`.

    Raises `Refused` for a key that cannot be another, and `UserError` for an unknown one or a wrong value.
    """
    try:
        given = given_config(job, run_id)
        journal = without_removed(given, read_journal(run_directory(job, run_id)))
        in_step = apply(given, in_force(journal, step))
        before = in_step.table()
    except ValueError as error:
        raise UserError(f"the configuration of run {run_id} cannot be read: {error}") from None
    if (overlong := given_overlong(in_step)) is not None:
        before["advantage"]["overlong"] = overlong
    flags = [f"--{key}={value}" for key, value in changes.items()]
    flagged = anchored(read_flags(RunConfig, keys_of(RunConfig), flags), Path.cwd())
    after = merge(before, flagged)
    _check_fixed(run_id, before, after, changes)
    own = {**after, "run_id": name, "resume": True, "output_dir": str((into or job).absolute())}
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


def given_config(job: Path, run_id: str) -> RunConfig:
    """Returns a run's configuration as its file had it. Raises `NotThere`, and `ValueError` if it is not valid."""
    if not (written := written_config(job, run_id)):
        raise NotThere(f"run {run_id} has not begun, or its control/orch.toml cannot be read")
    return RunConfig.model_validate(written)


def check_later(changes: Mapping[str, str], trained: int, step: int) -> None:
    """Raises `StepNotKept` for a change that steps would have that are trained again and did not have it."""
    for key in changes:
        if (key.startswith(("training.", "teacher.")) and key not in NOT_OF_A_STEP) or key == "steps":
            raise StepNotKept(
                f"{key} cannot be another from step {step + 1} on: the trainer has no checkpoint of step {step} itself, and "
                f"would train the steps {trained + 1} to {step} with it again; go on from one of its checkpoints"
            )
