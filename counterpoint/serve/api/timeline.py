"""`/jobs/{job}/runs/{run}/timeline`: what orchestrator, servers and trainer did around a step, and their idle shares."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from counterpoint.job.inspection import fleet
from counterpoint.serve.api.rollout_entries import RUN, RunParameters, Step, job_of
from counterpoint.serve.endpoint import Endpoint, reads
from counterpoint.serve.errors import NotFound
from counterpoint.serve.jobs import Jobs
from counterpoint.serve.readers.activity.timeline import Bar, Lane, Timelines
from counterpoint.serve.readers.rollouts.view import name_of as shown
from counterpoint.transport.config import Config

STEPS_NAMED = 1_000


class TimelineParameters(RunParameters):
    """Which steps."""

    step: Step | None = None
    """The last step that is shown; the newest without it."""
    span: int = Field(default=3, ge=1, le=50)
    """How many steps are shown."""


class TimelineStep(Config):
    """One step in the window."""

    step: int
    """The number of the step."""
    begin: float
    """The time when it began, which is when the one before it ended, in Unix seconds."""
    end: float
    """The time when it was committed and done."""


class TimelineBar(Config):
    """Something that was done, or several short things that were drawn as one."""

    name: str
    """The name of what was done."""
    begin: float
    """Unix seconds, cut to the window."""
    end: float
    """Unix seconds, cut to the window."""
    busy: float
    """Seconds of it that were really spent so."""
    waiting: bool
    """Whether this is waiting, and no work."""
    run: str
    """The run that it was for; empty if for none."""
    step: int
    """The step that it was for; 0 if for none."""
    count: int
    """How many spans it stands for."""
    detail: str
    """What is known besides, such as the version of weights."""


class TimelineLane(Config):
    """What one process did, or one side of it."""

    key: str
    """Unique in the answer."""
    role: Literal["orchestrator", "inference", "trainer"]
    """The role that did the work."""
    title: str
    """The title for people: a server's URL, for example."""
    bars: list[TimelineBar]
    """The bars, in the order of their beginnings. Those of different names may overlap."""
    left_out: int
    """The shortest bars, which are too many."""


class IdleShares(Config):
    """Shares of the window, from 0 to 1; null where nothing is known of a role."""

    orchestrator: float | None
    """Share in which it only waited."""
    inference: float | None
    """Share in which a server had neither a request nor weights to load: the mean of the servers."""
    trainer: float | None
    """Share in which it trained, published and saved nothing, for any run."""


class TimelineAnswer(Config):
    """The timeline of some steps."""

    begin: float
    """The begin of the window, in unix seconds; 0 without a step."""
    end: float
    """The end of the window, in unix seconds."""
    known: list[int]
    """All steps whose spans are kept, the newest 1,000."""
    steps: list[TimelineStep]
    """The steps that are shown; none while the run has committed no step."""
    lanes: list[TimelineLane]
    """The lanes, from the orchestrator over the servers to the trainer."""
    idle: IdleShares
    """How much of the window each role was idle."""
    servers_left_out: int
    """Servers that are too many to be drawn."""


@reads(f"{RUN}/timeline", "Shows what each role did around a step, and its idle share.")
def show_timeline(jobs: Jobs, given: TimelineParameters) -> TimelineAnswer:
    """Answers the timeline."""
    job = job_of(jobs, given)
    views = [view for view in fleet.read_views(job.directory) if view.run == given.run]
    urls = [server.url for server in fleet.join(views)]
    with jobs.reading(job, Timelines) as timelines:
        known = timelines.steps(given.run)
        until = known if given.step is None else [each for each in known if each[0] <= given.step]
        if given.step is not None and (not until or until[-1][0] != given.step):
            kept = f"{known[0][0]} to {known[-1][0]}" if known else "none yet"
            raise NotFound(
                f"no spans of step {given.step} are kept", where="step", value=str(given.step), expected=kept
            )
        if not until:
            return TimelineAnswer(
                begin=0.0,
                end=0.0,
                known=[],
                steps=[],
                lanes=[],
                idle=IdleShares(orchestrator=None, inference=None, trainer=None),
                servers_left_out=0,
            )
        found = timelines.show(given.run, until[-given.span :], urls)
    return TimelineAnswer(
        begin=found.begin,
        end=found.end,
        known=[step for step, _, _ in known[-STEPS_NAMED:]],
        steps=[TimelineStep(step=step, begin=begin, end=end) for step, begin, end in found.steps],
        lanes=[_lane(lane) for lane in found.lanes],
        idle=IdleShares(**found.idle),
        servers_left_out=found.servers_left_out,
    )


def _lane(lane: Lane) -> TimelineLane:
    return TimelineLane(
        key=shown(lane.key),
        role=lane.role,
        title=shown(lane.title),
        bars=[_bar(bar) for bar in lane.bars],
        left_out=lane.left_out,
    )


def _bar(bar: Bar) -> TimelineBar:
    return TimelineBar(
        name=shown(bar.name),
        begin=bar.begin,
        end=bar.end,
        busy=bar.busy,
        waiting=bar.is_waiting,
        run=shown(bar.run),
        step=bar.step,
        count=bar.count,
        detail=shown(bar.detail),
    )


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (show_timeline,)
