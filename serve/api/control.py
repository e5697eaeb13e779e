"""Steering one run over the API: the functions of `job/admin/`, each as an endpoint below `/jobs/{job}/runs/{run}`.

`serve/api/guests_and_servers.py` has what concerns a whole job. A request may be made again under its `request_id`, as after a
lost connection: it is carried out once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field

from job.admin.change import Changed, change_run
from job.admin.inspect import inspect_run
from job.admin.run_requests import (
    Dumped,
    Paused,
    Profiled,
    Saved,
    checkpoint_now,
    dump_next_step,
    pause_run,
    profile_loop,
    resume_run,
)
from job.admin.stop import Ended, evict_run, stop_run
from serve.endpoint import Endpoint
from serve.jobs import Jobs
from transport.config import Config, Identifier

MOST_WAIT_SECONDS = 600.0
SPARE_SECONDS = 30.0
"""Above the wait, for the request itself: the deadline of the endpoint is behind that of the wait."""

Wait = Annotated[float, Field(gt=0, le=MOST_WAIT_SECONDS)]
Reason = Annotated[str, Field(max_length=1000)]


class RunParameters(Config):
    """Names a run."""

    job: str
    """The job's id."""
    run: Identifier
    """The run's id."""


class Request(RunParameters):
    """What every request to a run may say."""

    request_id: Identifier | None = None
    """Names the request, so that it can be made again, and is carried out once. Unset: a new one."""
    wait_seconds: Wait = 30.0
    """How long to wait for the answer; then the request is taken back."""


class PauseParameters(Request):
    """Pauses a run."""

    reason: Reason = ""
    """Is shown with the run."""


class LongRequest(Request):
    """A request that may take minutes."""

    wait_seconds: Wait = 300.0
    """How long to wait for the answer; then the request is taken back."""


class ChangeParameters(Request):
    """Changes keys of a run's configuration."""

    changes: dict[str, Any] = Field(min_length=1, max_length=64)
    """New values by dotted key, such as `sampling.temperature`. `GET .../control` lists the keys."""


class ProfileParameters(Request):
    """Samples the event loop of a run's orchestrator."""

    seconds: float = Field(default=10.0, gt=0, le=300)
    """For how long."""


class EndParameters(RunParameters):
    """Ends a run."""

    wait_seconds: float = Field(default=0.0, ge=0, le=MOST_WAIT_SECONDS)
    """How long to wait for its end. 0: not at all."""


class EvictParameters(EndParameters):
    """Ends a run for good."""

    reason: Reason = ""
    """Is shown with the run."""


class Control(Config):
    """What steers a run."""

    run_id: str
    """The run's id."""
    state: str
    """In a word or two."""
    step: int | None
    """Its newest step; null while there is none."""
    steps: int | None
    """The configured number of steps; null if unknown."""
    paused: PauseNote | None
    """Null unless it is paused."""
    changeable: dict[str, Any]
    """The keys that may change, with the value that the next step has. Empty while they are unknown."""
    changes: list[dict[str, Any]]
    """What has changed, oldest first; the newest 200."""


class PauseNote(Config):
    """That a run is paused."""

    since: float
    """Unix seconds."""
    reason: str
    """As given."""


def _inspect(jobs: Jobs, asked: RunParameters) -> Control:
    job = jobs.get(asked.job)
    job.run_directory(asked.run)
    found = inspect_run(job.directory, asked.run)
    return Control(
        run_id=asked.run,
        state=found.get("state", "unknown"),
        step=found.get("step"),
        steps=found.get("steps"),
        paused=found["paused"],
        changeable=found["changeable"],
        changes=found["changes"][-200:],
    )


Answered = TypeVar("Answered", bound=Config)


def _verb(
    name: str,
    summary: str,
    parameters: type[RunParameters],
    result: type[Answered],
    act: Callable[[Path, Any], Answered],
    *,
    is_urgent: bool = False,
) -> Endpoint[Any, Any]:
    """Returns the endpoint that does `act` to a run, and answers with its result."""

    def answer(jobs: Jobs, asked: RunParameters) -> Answered:
        job = jobs.get(asked.job)
        job.run_directory(asked.run)
        return act(job.directory, asked)

    return Endpoint(
        "POST", f"/jobs/{{job}}/runs/{{run}}/{name}", summary, parameters, result, answer, "change",
        seconds=MOST_WAIT_SECONDS + SPARE_SECONDS, is_urgent=is_urgent,
    )  # fmt: skip


def _waiting(asked: Request) -> dict[str, Any]:
    return {"timeout": asked.wait_seconds, "request_id": asked.request_id}


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (
    Endpoint(
        "GET",
        "/jobs/{job}/runs/{run}/control",
        "Shows whether a run is paused, which keys may change, and what has changed.",
        RunParameters,
        Control,
        _inspect,
    ),
    _verb(
        "pause", "Pauses a run: no group of rollouts starts; what is in flight finishes.", PauseParameters, Paused,
        lambda job, asked: pause_run(job, asked.run, asked.reason, **_waiting(asked)),
        is_urgent=True,
    ),
    _verb(
        "resume", "Lets a paused run go on.", Request, Paused,
        lambda job, asked: resume_run(job, asked.run, **_waiting(asked)),
    ),
    _verb(
        "stop", "Ends a run in order; it can be resumed.", EndParameters, Ended,
        lambda job, asked: stop_run(job, asked.run, wait_seconds=asked.wait_seconds),
        is_urgent=True,
    ),
    _verb(
        "evict", "Ends a run for good, with a reason.", EvictParameters, Ended,
        lambda job, asked: evict_run(job, asked.run, asked.reason, wait_seconds=asked.wait_seconds),
        is_urgent=True,
    ),
    _verb(
        "checkpoint", "Makes the newest step of a run durable at once, and keeps that checkpoint.", LongRequest, Saved,
        lambda job, asked: checkpoint_now(job, asked.run, **_waiting(asked)),
    ),
    _verb(
        "change", "Gives keys of a run new values from its next step on, all of them or none.", ChangeParameters, Changed,
        lambda job, asked: change_run(job, asked.run, asked.changes, **_waiting(asked)),
    ),
    _verb(
        "dump", "Waits for the next step of a run and has it dumped for `counterpoint replay`.", LongRequest, Dumped,
        lambda job, asked: dump_next_step(job, asked.run, **_waiting(asked)),
    ),
    _verb(
        "profile", "Samples what the event loop of a run's orchestrator does.", ProfileParameters, Profiled,
        lambda job, asked: profile_loop(
            job, asked.run, asked.seconds, timeout=asked.seconds + asked.wait_seconds, request_id=asked.request_id
        ),
    ),
)  # fmt: skip
