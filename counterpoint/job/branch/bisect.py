"""Finds the rollout that made a metric go bad: by the recorded metric its steps, then by branches that leave rollouts out.

A branch trains the steps again without some of the rollouts, joins the live job, plays a few steps with the weights that came of
it, and ends. `counterpoint/job/branch/bisection.py` decides what each leaves out. The branches are the record: what one has
shown, its directory says, with what it leaves out, so that the same bisection goes on after a kill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from math import inf
from pathlib import Path
from statistics import fmean, median

from counterpoint.job.admin.ask import NotAnswered, run_directory
from counterpoint.job.branch.batches import read_batch
from counterpoint.job.branch.begin import branch
from counterpoint.job.branch.bisection import Bisection, Fall, Narrowed, branches_for, fall_of
from counterpoint.job.branch.configuration import given_config
from counterpoint.job.branch.kept import StepNotKept, kept_of
from counterpoint.job.branch.played import PlayedBranch, check_places, made_config, play, require_running
from counterpoint.job.reading.metrics.metrics_lines import Follower, Line
from counterpoint.run.branches import origin_of
from counterpoint.run.config import RunConfig
from counterpoint.trainer.runs.control_files import eviction
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.untrusted import UntrustedFileError
from counterpoint.transport.records import Batch

MOST_BRANCHES = 10
"""Most branches of a bisection."""

PATIENCE_SECONDS = 600.0
"""How long a branch may show nothing, besides ten times what a step of the run usually took, for each of its steps."""

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
    """The longest that a branch may show nothing, in seconds."""

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
    lines = {line["step"]: line for line in _lines(Follower(run_directory(job, run_id) / "metrics.jsonl"))}
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
    """Returns the rollouts of batches, each batch's evenly among the others': no half of them is all of a batch.

    Raises `UserError` for a batch of one rollout.
    """
    placed: list[tuple[float, str]] = []
    for batch in batches:
        rollouts = list(dict.fromkeys(sample.rollout_id for sample in batch.samples))
        if len(rollouts) == 1:
            raise UserError(
                f"step {batch.step} has trained rollout {rollouts[0]} alone, and no branch can leave all of a step out: "
                f"look at that rollout, or branch from step {batch.step - 1}, whose next step is played anew"
            )
        placed += [((place + 0.5) / len(rollouts), rollout) for place, rollout in enumerate(rollouts)]
    return [rollout for _, rollout in sorted(placed)]


def carry_out(plan: BisectPlan, say: Callable[[str], None]) -> Narrowed:
    """Plays the branches one after the other, and returns what they have shown; `say` is told of each.

    What a branch of an earlier bisection has shown counts, and one that was interrupted goes on. Call it from the main thread.

    Raises `UserError` if the job does not run, its trainer has no slot, or a branch cannot go on or takes too long, and as
    `branch`. An exception of a signal's handler ends it, and the branch that plays.
    """
    require_running(plan.job)
    bisection = Bisection(plan.suspects, MOST_BRANCHES)
    while not isinstance(asked := bisection.next(), Narrowed):
        config = _made(plan, asked.rollouts)
        try:
            value = _measured(plan, config)
        except NotAnswered as error:
            raise UserError(str(error)) from None
        is_good = plan.fall.is_good(value)
        bisection.measured(is_good)
        left_out = f"{len(asked.rollouts)} rollouts" if len(asked.rollouts) > 1 else f"rollout {asked.rollouts[0]}"
        say(f"run {config.run_id}, without {left_out}: {plan.metric} is {value:.4g}, {'good' if is_good else 'bad'}")
    return asked


def branches_of(job: Path, run_id: str) -> Iterator[str]:
    """Yields the ids of the branches that bisections of a run have made, first to last."""
    for name in _names(run_id):
        if not (job / f"run_{name}").exists():
            return
        origin = origin_of(job / f"run_{name}")
        if origin is not None and origin.run == run_id:
            yield name


def _names(run_id: str) -> Iterator[str]:
    return (f"{run_id[:50]}-bisect-{number}" for number in count(1))


def _made(plan: BisectPlan, without: Sequence[str]) -> RunConfig:
    """Returns the branch without these rollouts: the one of an earlier bisection, or a new one."""
    for name in branches_of(plan.job, plan.run_id):
        origin = origin_of(plan.job / f"run_{name}")
        its = origin and (origin.step, origin.changes, origin.without)
        if its == (plan.step, {}, [*without]) and not eviction(plan.job, name):
            return made_config(plan.job / f"run_{name}")
    check_places(plan.job, 1)
    free = next(name for name in _names(plan.run_id) if not (plan.job / f"run_{name}").exists())
    return branch(plan.job, plan.run_id, plan.step, free, {}, without)


def _measured(plan: BisectPlan, config: RunConfig) -> float:
    """Returns the mean of the metric over a branch's steps, and plays those that it has not played."""
    follower, values = Follower(config.run_dir / "metrics.jsonl"), list[float]()

    def has_moved() -> bool:
        before = len(values)
        # Of steps that it has played with weights that it has trained.
        values.extend(
            line[plan.metric]
            for line in _lines(follower, values.clear)
            if plan.metric in line and line["step"] > plan.step and line["step"] - line.get(_AGE, inf) >= plan.step
        )
        return len(values) > before

    def is_known() -> bool:
        return len(values) >= plan.steps

    has_moved()
    playing = PlayedBranch(config, has_moved, is_known, plan.patience)
    play(plan.job, [playing], lambda: is_known() or playing.has_ended)
    if not is_known():
        raise UserError(
            f"run {config.run_id} has made all its steps, and of {plan.steps} that count {len(values)} have {plan.metric}; see "
            f"`counterpoint logs {config.run_id}`"
        )
    return fmean(values[: plan.steps])


def _lines(follower: Follower, restart: Callable[[], None] = lambda: None) -> Iterator[Line]:
    try:
        yield from follower.new_lines(restart)
    except UntrustedFileError as error:
        raise UserError(f"{follower.path} cannot be read: {error}") from None
