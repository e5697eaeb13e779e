"""Changes keys of a run from its next step on. `counterpoint/run/changes.py` says which may change, and has their journal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from counterpoint.job.admin.ask import ANSWER_SECONDS, Refused, VerbOutcome, ask, run_directory
from counterpoint.job.derive import check_lengths
from counterpoint.job.directory import JOB_FILE, read_as, written_config
from counterpoint.run.changes import (
    ChangeRefused,
    JournalError,
    apply,
    changeable_keys,
    in_force,
    read_journal,
    values_of,
    without_removed,
)
from counterpoint.run.config import RunConfig
from counterpoint.run.requests import ChangeRequest


class Changed(VerbOutcome, frozen=True):
    """New values."""

    step: int
    """The first step that has them."""
    changes: dict[str, Any]
    """The new values by dotted key."""


def change_run(job: Path, run_id: str, asked: ChangeRequest, wait_seconds: float = ANSWER_SECONDS) -> Changed:
    """Gives keys new values, all of them or none.

    Raises as `ask.ask`; `Refused` names each key that may not change or take the value, and what the job's servers cannot hold.
    """
    _check_lengths(job, run_id, asked.changes)
    step = ask(job, run_id, asked, wait_seconds).step or 0
    words = ", ".join(f"{key} = {value!r}" for key, value in asked.changes.items())
    sentence = f"run {run_id}, from step {step} on: {words}"
    return Changed(run_id=run_id, sentence=sentence, step=step, changes=asked.changes)


def changeable_values(job: Path, run_id: str) -> dict[str, Any]:
    """Returns the keys of a run that may change, with the values that its next step has. Raises `NotThere`, `Refused`."""
    try:
        config = _config_of_next_step(job, run_id)
        return values_of(config, changeable_keys(config))
    except (ChangeRefused, JournalError, ValueError) as error:
        raise Refused(f"the configuration of run {run_id} cannot be read: {error}") from None


def _config_of_next_step(job: Path, run_id: str) -> RunConfig:
    """Raises `NotThere`, `Refused`, and `ChangeRefused`, `JournalError` or `ValueError` for what cannot be read."""
    run_dir = run_directory(job, run_id)
    written = written_config(job, run_id)
    if not written:
        raise Refused(f"run {run_id} has not begun, or its control/orch.toml cannot be read")
    given = RunConfig.model_validate(written)
    return apply(given, in_force(without_removed(given, read_journal(run_dir)), given.steps + 1))


def _check_lengths(job: Path, run_id: str, changes: Mapping[str, Any]) -> None:
    """Raises `Refused` for completions that leave no room for a prompt at the job's servers: the run does not know their limit.

    What else is wrong with a change is for the run to say.
    """
    if not (job / JOB_FILE).exists():
        return
    servers = read_as(_Job, job / JOB_FILE).inference
    if servers is None:
        return
    try:
        changed = apply(_config_of_next_step(job, run_id), changes)
    except (Refused, ValueError):
        return
    try:
        check_lengths("", changed, servers.max_model_len)
    except ValueError as error:
        raise Refused(str(error)) from None


class _Servers(BaseModel):
    max_model_len: int


class _Job(BaseModel):
    """What is needed of `job.json`."""

    inference: _Servers | None = None
