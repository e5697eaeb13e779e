"""Finds the rollout that made a metric go bad: by the recorded metric its steps, then by branches that leave rollouts out.

A branch trains the steps again without some of the rollouts, joins the live job, plays a few steps with the weights that came of
it, and is evicted. `counterpoint/job/branch/bisection.py` decides what each leaves out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from math import inf
from pathlib import Path
from statistics import fmean, median

from counterpoint.job.admin.ask import run_directory
from counterpoint.job.admin.join import Joined
from counterpoint.job.admin.stop import Eviction, evict_run
from counterpoint.job.branch.batches import read_batch
from counterpoint.job.branch.begin import branch, start
from counterpoint.job.branch.bisection import Bisection, Fall, Narrowed, branches_for, fall_of
from counterpoint.job.branch.configuration import given_config
from counterpoint.job.branch.kept import StepNotKept, kept_of
from counterpoint.job.directory import is_running, living_runs, orchestrator_of
from counterpoint.job.reading.metrics.metrics_lines import Follower, Line
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.untrusted import UntrustedFileError
from counterpoint.transport.records import Batch

MOST_BRANCHES = 10
"""Most branches of a bisection."""

PATIENCE_SECONDS = 600.0
"""How long a branch may take, besides ten times what a step of the run usually took, for each of its steps."""

_POLL_SECONDS = 1.0

_AGE = "staleness/max"


@dataclass(frozen=True, slots=True)
class BisectPlan:
    """What a bisection looks for, and what it takes."""

    job: Path
    run_id: str
    metric: str
    fall: Fall
    first: int
    last: int
    """The steps whose rollouts may have made it fall."""
    suspects: list[str]
    """The ids of these rollouts."""
    step: int
    """The kept step that branches go on from."""
    trained: int
    """The step from which on a branch may train again, at the most."""
    steps: int
    """How many steps of its own each branch plays."""
    patience: float
    """The longest that a branch may take, in seconds."""

    @property
    def branches(self) -> int:
        """How many branches it takes at the most."""
        return branches_for(len(self.suspects), MOST_BRANCHES)

    def __str__(self) -> str:
        """Returns what was found and what it will cost, for a person."""
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        again = self.step - self.trained
        return (
            f"{self.metric} went bad at step {self.fall.step} of run {self.run_id}: it was {self.fall.good:.4g}, and became "
            f"{self.fall.bad:.4g}. {len(self.suspects)} rollouts of {steps} may have done it. To find one takes at most "
            f"{self.branches} branches after step {self.step}. Steps that are trained again: up to {again} a branch, "
            f"{self.branches * again} in all; that are played: {self.steps} a branch, {self.branches * self.steps} in all"
        )


def plan(job: Path, run_id: str, metric: str, good: int, bad: int, steps: int) -> BisectPlan:
    """Returns the plan of a bisection. Raises `NotThere`, `StepNotKept` and `UserError`."""
    lines = {line["step"]: line for line in _lines(run_directory(job, run_id))}
    values = {step: line[metric] for step, line in lines.items() if metric in line}
    fall = fall_of(metric, values, good, bad)
    last, last_good = fall.step - 1, max(step for step in values if step < fall.step)
    # The last good step was played by weights at most so many steps old: steps that these have trained are not to blame.
    first = max(1, last_good + 1 - int(lines[last_good].get(_AGE, 1)))
    kept = kept_of(job, run_id)
    usable = [each for each in kept.steps if each >= last and kept.starts(each)[0] < first]
    if not usable:
        raise StepNotKept(
            f"{metric} went bad at step {fall.step}, and run {run_id} has not kept what it takes to train steps {first} to "
            f"{last} again: a checkpoint of the trainer before them, the batches since, and a checkpoint of the orchestrator "
            "after them; training.keep_every and keep_batches keep these"
        )
    step, largest = usable[0], given_config(job, run_id).transport.largest_batch
    suspects = _spread(read_batch(kept.batches[each], largest) for each in range(first, last + 1))
    trained = max(each for each in kept.starts(step) if each < first)
    times = [lines[each]["time"] for each in sorted(lines)]
    usual = median([later - earlier for earlier, later in pairwise(times)] or [0.0])
    patience = PATIENCE_SECONDS + 10 * usual * (step - trained + steps)
    return BisectPlan(job, run_id, metric, fall, first, last, suspects, step, trained, steps, patience)


def _spread(batches: Iterable[Batch]) -> list[str]:
    """Returns the rollouts of batches, each batch's evenly among the others': no half of them is all of a batch."""
    placed: list[tuple[float, str]] = []
    for batch in batches:
        rollouts = list(dict.fromkeys(sample.rollout_id for sample in batch.samples))
        placed += [((place + 0.5) / len(rollouts), rollout) for place, rollout in enumerate(rollouts)]
    return [rollout for _, rollout in sorted(placed)]


def carry_out(plan: BisectPlan, say: Callable[[str], None]) -> Narrowed:
    """Begins the branches one after the other, and returns what they have shown; `say` is told of each.

    Raises `UserError` if the job does not run, or a branch ends too early or takes too long, and as `branch` and `start`. An
    exception of a signal's handler ends it, too, and evicts the branch.
    """
    if not is_running(plan.job):
        raise UserError(
            f"the job in {plan.job} does not run, and branches play in a live one: start it with --resume, and with --stay true "
            "if its own runs are done"
        )
    bisection = Bisection(plan.suspects, MOST_BRANCHES)
    while not isinstance(asked := bisection.next(), Narrowed):
        name = next(each for each in _names(plan) if not (plan.job / f"run_{each}").exists())
        config = branch(plan.job, plan.run_id, plan.step, name, {}, asked.rollouts)
        with _evicted(plan, name):
            value = _measured(plan, start(plan.job, config))
        is_good = plan.fall.is_good(value)
        bisection.measured(is_good)
        left_out = f"{len(asked.rollouts)} rollouts" if len(asked.rollouts) > 1 else f"rollout {asked.rollouts[0]}"
        say(f"run {name}, without {left_out}: {plan.metric} is {value:.4g}, {'good' if is_good else 'bad'}")
    return asked


def left_alive(job: Path, run_id: str) -> list[str]:
    """Returns the branches of earlier bisections of a run that are alive, as those of one that was killed are."""
    return [each for each in living_runs(job) if re.fullmatch(re.escape(_beginning(run_id)) + r"\d+", each)]


def _names(plan: BisectPlan) -> Iterator[str]:
    return (f"{_beginning(plan.run_id)}{number}" for number in count(1))


def _beginning(run_id: str) -> str:
    """Returns what the names of a run's branches begin with; a number follows."""
    return f"{run_id[:50]}-bisect-"


@contextmanager
def _evicted(plan: BisectPlan, name: str) -> Iterator[None]:
    """Evicts a branch at the end of the block, also while it starts, so that the next one finds a slot."""
    (plan.job / f"run_{name}" / "control").mkdir(exist_ok=True)  # its orchestrator has not begun, and may not
    try:
        yield
    finally:
        evict_run(plan.job, name, Eviction(reason=f"a branch of `counterpoint bisect {plan.run_id}`, which has ended"))


def _measured(plan: BisectPlan, joined: Joined) -> float:
    """Waits until a branch has played its steps with weights that it has trained, and returns the mean of the metric."""
    deadline = time.monotonic() + plan.patience
    while True:
        lines = [line for line in _lines(plan.job / f"run_{joined.run_id}") if line["step"] > plan.step]
        own = [
            line[plan.metric]
            for line in lines
            if plan.metric in line and line["step"] - line.get(_AGE, inf) >= plan.step
        ]
        if len(own) >= plan.steps:
            return fmean(own[: plan.steps])
        if orchestrator_of(plan.job, joined.run_id) is None:
            raise UserError(f"run {joined.run_id} has ended before its metric was known; see {joined.log}")
        if time.monotonic() > deadline:
            raise UserError(
                f"run {joined.run_id} has played {len(own)} of {plan.steps} steps within {plan.patience:.0f} s; see "
                f"{joined.log}, and whether the trainer has a slot for it (trainer.max_runs)"
            )
        time.sleep(_POLL_SECONDS)


def _lines(run_dir: Path) -> Iterator[Line]:
    file = run_dir / "metrics.jsonl"
    try:
        yield from Follower(file).new_lines(lambda: None)
    except FileNotFoundError:
        return
    except UntrustedFileError as error:
        raise UserError(f"{file} cannot be read: {error}") from None
