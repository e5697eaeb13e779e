"""Makes out of what somebody asks what a trial needs to begin, or refuses it, before anything is written or started."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import orjson

from counterpoint.job.admin.ask import NotThere, require_job
from counterpoint.job.branch.configuration import branched_config, check_later
from counterpoint.job.branch.kept import kept_of
from counterpoint.job.branch.played import check_places
from counterpoint.job.check import check_imports
from counterpoint.job.configuration.named_files import check_run_files
from counterpoint.job.join import allowed_imports, check_joins
from counterpoint.job.trial.decisions import SIDES, Side
from counterpoint.job.trial.measure import fair_interval
from counterpoint.job.trial.record import TrialAsked, TrialRecord
from counterpoint.run.config import RunConfig
from counterpoint.run.evaluations import EvaluationConfig
from counterpoint.transport.errors import UserError

SHARE = 0.5
"""The `share` of the evaluation by which branches are compared."""

MOST_OF_RUN = 43
"""Characters of the run's id in a trial's name: the ids of its branches, `<name>-without`, have 64 at most."""

MEASURED_BY = ("evaluations", "opponents", "steps", "resume")
"""Keys that a trial does not change: by which it measures, and where both branches end."""


def asked_of(
    job: Path,
    run_id: str,
    changes: Mapping[str, str],
    tokens: int,
    *,
    step: int | None = None,
    evaluation: str | None = None,
) -> tuple[TrialRecord, TrialAsked]:
    """Returns the record of a trial, and what is asked. The name follows from the values; one that was begun with them goes on.

    What was asked of a trial of which there is no branch yet is made out anew: its step may not be kept any more.

    Raises `UserError`, with the key, for what cannot be tried, `StepNotKept`, `NotThere` for an unknown run or evaluation, and
    `Refused` for a job that does not run, or that has no place for two runs more. Nothing was written then.
    """
    require_job(job)
    record = TrialRecord(job, trial_name(run_id, changes, tokens, step, evaluation))
    if (known := record.asked) is not None and record.is_begun:
        return record, known
    for key in changes:
        if key.split(".")[0] in MEASURED_BY:
            raise UserError(f"{key} cannot be tried: both branches are measured as run {run_id} is, and end with it")
    kept = kept_of(job, run_id)
    first = kept.check(step)
    if (trained := kept.starts(first)[-1]) < first:
        check_later(changes, trained, first)
    config = branched_config(job, run_id, first, record.branch("with"), {})
    if first >= config.steps:
        raise UserError(f"run {run_id} has no step after {first}: steps = {config.steps}; name a former one by --step")
    chosen = _evaluation_of(config, run_id, evaluation)
    asked = TrialAsked(
        run=run_id,
        step=first,
        changes=dict(changes),
        tokens=tokens,
        evaluation=chosen.name,
        interval=fair_interval(job / f"run_{run_id}", chosen.name) or chosen.interval,
    )
    planned = [
        branched_config(job, run_id, first, record.branch(side), changes_of(job, record, asked, side))
        for side in reversed(SIDES)
    ]
    for each in planned:
        check_joins(each, job)
        check_run_files(each)
    check_imports(planned, allowed=allowed_imports(job))
    check_places(job, len(SIDES))
    return record, asked


def trial_name(run_id: str, changes: Mapping[str, str], tokens: int, step: int | None, evaluation: str | None) -> str:
    """Returns the name of the trial of which this is asked. Of a long run id it has the beginning alone."""
    values = [sorted(changes.items()), tokens, step, evaluation]
    text = json.dumps(values if len(run_id) <= MOST_OF_RUN else [run_id, *values])
    return f"{run_id[:MOST_OF_RUN]}-try-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def changes_of(job: Path, record: TrialRecord, asked: TrialAsked, side: Side) -> dict[str, str]:
    """Returns the changes by which a branch is made: what is tried, and the one evaluation, as often as the trial compares.

    The evaluation samples as it does without the change, also where that is of the run's `sampling`. It measures no step that
    the branches have in common: their weights are the same there, so that it would say nothing of the change.
    """
    config = branched_config(job, asked.run, asked.step, record.branch(side), {})
    own = _evaluation_of(config, asked.run, asked.evaluation)
    sampling = config.sampling.table() | own.sampling.table()
    measuring = own.table() | {"interval": asked.interval, "share": max(own.share, SHARE), "sampling": sampling}
    measuring["at_start"] = False
    tried = asked.changes if side == "with" else {}
    return {**tried, "evaluations": orjson.dumps([measuring]).decode()}


def _evaluation_of(config: RunConfig, run_id: str, name: str | None) -> EvaluationConfig:
    """The evaluation with this name, or the first one."""
    if not config.evaluations:
        raise UserError(
            f"run {run_id} has no evaluations, so no held-out examples to compare branches by; its file needs "
            "[[orchestrator.evaluations]] (docs/evaluation.md)"
        )
    known = {each.name: each for each in config.evaluations}
    if name is not None and name not in known:
        raise NotThere(f"there is no evaluation {name!r}; run {run_id} has {', '.join(known)}")
    return config.evaluations[0] if name is None else known[name]
