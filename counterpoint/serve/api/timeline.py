"""`/jobs/{job}/runs/{run}/timeline`: what orchestrator, servers and trainer did around a step, and their idle shares."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from counterpoint.job.reading.activity import fleet
from counterpoint.job.reading.activity.timeline import TimelineAnswer, Timelines
from counterpoint.serve.api.rollout_entries import RUN, RunParameters, Step, job_of
from counterpoint.serve.endpoint import Endpoint, reads
from counterpoint.serve.errors import NotFound
from counterpoint.serve.jobs import Jobs


class TimelineParameters(RunParameters):
    """Which steps."""

    step: Step | None = None
    """The last step that is shown; the newest without it."""
    span: int = Field(default=3, ge=1, le=50)
    """How many steps are shown."""


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
        return timelines.show(given.run, known, until[-given.span :], urls)


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (show_timeline,)
