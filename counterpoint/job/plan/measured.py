"""What a job has measured: what its rollouts are like, the seconds of its steps, and what corrects a prediction of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from counterpoint.job.config import SHARED, JobConfig
from counterpoint.job.directory import JOB_FILE, read_json
from counterpoint.job.plan.speed import Corrections, Rollouts, Speed
from counterpoint.job.reading.metrics.balance import advice, idle_of
from counterpoint.job.reading.metrics.history import History
from counterpoint.job.reading.metrics.metrics_lines import Line
from counterpoint.orchestrator.scheduling.lossless import BOUND, LEAD, LOST, LOST_MEAN
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.wrong_types import first_wrong

LOSSLESS = (BOUND, LEAD, LOST, LOST_MEAN)

LEFT_OUT, NEWEST = 5, 100
"""The first steps, which are slow, and how many of the newest ones count."""

LEAST = 5
"""Steps of which something is computed."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The newest steps of a job of one run; means, in seconds."""

    job: JobConfig
    shipped: list[Line]
    trained: list[Line]
    rollouts: Rollouts
    wall: float
    trainer: float
    """Seconds that the trainer trains."""
    publishing: float
    servers: float
    """Seconds of generation: the step without its boundary, and without what it waited for trainer and servers."""
    pause: float
    """Seconds of waiting for servers, as while they load weights, and of the boundary."""
    staleness: float

    @property
    def advice(self) -> str:
        """Who waits for whom, and what would end it; empty if nobody does for long."""
        (run,) = self.job.every_run
        idle = idle_of(self.shipped, self.trained)
        return advice(idle, run.schedule, self.job.inference.replicas, self.job.trainer.ranks)

    def as_json(self) -> dict[str, Any]:
        """Returns what was measured, for programs."""
        names = ("wall", "trainer", "publishing", "servers", "pause", "staleness", "advice")
        lossless = {name: value for name, value in self.shipped[-1].items() if name in LOSSLESS}
        return {name: getattr(self, name) for name in names} | {"rollouts": asdict(self.rollouts)} | lossless

    def corrections(self, predicted: Speed) -> Corrections:
        """Returns what corrects this prediction of the job, which has no correction and no pause."""
        return Corrections(
            self.trainer / predicted.trainer, self.servers / predicted.servers, self.publishing, self.pause
        )


def rollouts_of(text: str) -> Rollouts:
    """Reads the mean tokens of a rollout, `PROMPT+COMPLETION`. Raises `UserError`."""
    prompt, plus, completion = text.partition("+")
    if not (plus and prompt.isdecimal() and completion.isdecimal() and int(completion)):
        raise UserError(
            f"--speed {text!r}: expected the directory of a job that has run, or the mean tokens of a rollout as "
            "PROMPT+COMPLETION, such as 200+800"
        )
    return Rollouts(int(prompt), int(completion), int(prompt) + int(completion))


def measured(directory: Path) -> Measured:
    """Reads a job's directory. Raises `UserError` if it is none of one run, or has too few steps."""
    job = _job_of(directory / JOB_FILE)
    if len(job.every_run) != 1:
        raise UserError(
            f"{directory}: this job has {len(job.every_run)} runs; expected the directory of a job of one run"
        )
    (run,) = job.every_run
    history = History.of(directory, run.run_id)
    history.refresh()
    if history.unreadable:
        raise UserError(f"{directory}: {history.unreadable}")
    shipped = [line for step, line in sorted(history.shipped.items()) if step > LEFT_OUT][-NEWEST:]
    trained = [line for step, line in sorted(history.trained.items()) if step > LEFT_OUT][-NEWEST:]
    if min(len(shipped), len(trained)) < LEAST:
        raise UserError(
            f"{directory}: {len(shipped)} steps are shipped and {len(trained)} trained after the first {LEFT_OUT}; expected at "
            f"least {LEAST}: let the job go on, or name another"
        )
    count = run.schedule.rollouts_per_step
    ended = _total(shipped, "rollouts/completed") + _total(shipped, "rollouts/failed")
    found = Measured(
        job,
        shipped,
        trained,
        Rollouts(
            prompt=_total(shipped, "tokens/prompt") / max(1.0, ended),
            completion=max(1.0, _total(shipped, "tokens/completion")) / max(1.0, ended),
            trained=_total(shipped, "batch/tokens") / (len(shipped) * count),
            played=(ended + _total(shipped, "rollouts/cancelled")) / (len(shipped) * count),
            cached=_mean(shipped, "inference/cache_hit_share"),
        ),
        wall=_mean(shipped, "wall_seconds"),
        trainer=_mean(trained, "phase/train"),
        publishing=_mean(trained, "phase/broadcast"),
        servers=_mean(shipped, "wall_seconds") - _mean(shipped, *_NOT_GENERATION, *_WAITS),
        pause=_mean(shipped, *_NOT_GENERATION),
        staleness=_mean(shipped, "staleness/mean"),
    )
    _check(directory, found)
    return found


def _check(directory: Path, found: Measured) -> None:
    """Raises `UserError` where a number cannot be that of a step: a run's file may hold anything."""
    rollouts = asdict(found.rollouts)
    above = {name: getattr(found, name) for name in ("wall", "trainer", "servers")}
    above |= {name: rollouts[name] for name in ("completion", "trained", "played")}
    least = {name: getattr(found, name) for name in ("publishing", "pause")} | {"prompt": rollouts["prompt"]}
    wrong = [f"{name} = {value:g}" for name, value in above.items() if value <= 0]
    wrong += [f"{name} = {value:g}" for name, value in least.items() if value < 0]
    if not 0 <= found.rollouts.cached <= 1:
        wrong.append(f"cached = {found.rollouts.cached:g}")
    if wrong:
        raise UserError(
            f"{directory}: the metrics of its newest {len(found.shipped)} steps give {', '.join(wrong)}, which cannot be; "
            "look at the lines of metrics.jsonl, or name another job"
        )


def _job_of(path: Path) -> JobConfig:
    """Returns the job with its roles' model and directory, which are absolute paths there."""
    content = read_json(path)
    for section in SHARED:
        if isinstance(values := content.get(section), dict):
            content |= {name: values.pop(name) for name in SHARED[section] if name in values}
    try:
        return JobConfig.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{path} cannot be used: {first_wrong(error)}") from None


_WAITS = ("phase/wait_stragglers", "phase/wait_trainer", "phase/paused")
_NOT_GENERATION = tuple(f"phase/{name}" for name in ("wait_inference", "merge", "records", "commit", "malloc_trim"))


def _total(lines: Sequence[Line], name: str) -> float:
    return float(sum(line.get(name, 0.0) for line in lines))


def _mean(lines: Sequence[Line], *names: str) -> float:
    """Returns the mean of the sum of these metrics."""
    return sum(_total(lines, name) for name in names) / len(lines)
