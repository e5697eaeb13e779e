"""Steering over the API: an endpoint for each verb (`counterpoint/job/admin/verbs.py`), a run's state, and guests who join.

A request may be made again under its `request_id`, as after a lost connection: it is carried out once.
"""

from __future__ import annotations

import os
from inspect import signature
from typing import Annotated, Any, get_type_hints

from pydantic import Field, create_model

from counterpoint.job.admin.inspect import inspect_run
from counterpoint.job.admin.join import Joined, join_run
from counterpoint.job.admin.servers import Server, list_servers
from counterpoint.job.admin.verbs import RUN_VERBS, SERVER_VERBS, Verb, sentence_of
from counterpoint.job.reading.rollouts.view import name_of
from counterpoint.job.serving.config import WORKER_VARIABLE
from counterpoint.run.requests import LONGEST_PROFILE_SECONDS, RunRequest
from counterpoint.serve.api.jobs import NoParameters
from counterpoint.serve.endpoint import ChangeForbidden, Endpoint, reads
from counterpoint.serve.jobs import Jobs
from counterpoint.serve.openapi import Described
from counterpoint.transport.config import Config, Identifier
from counterpoint.transport.configuration.docstrings import docstring_of

MOST_WAIT_SECONDS = 600.0
SPARE_SECONDS = 30.0
"""Above the wait, for the request itself: the deadline of the endpoint is behind that of the wait, and of a profile before it."""

JOIN_SECONDS = 60.0
LONGEST_FILE = 2**15
"""Characters of a run's file; the body of a request is bounded, too."""

Wait = Annotated[float, Field(gt=0, le=MOST_WAIT_SECONDS)]


class RunParameters(Config):
    """Names a run."""

    job: str
    """The job's id."""
    run: Identifier
    """The run's id."""


class RequestParameters(RunParameters):
    """What every request to a run may say."""

    request_id: Identifier | None = None
    """Names the request, so that it can be made again, and is carried out once. Unset: a new one."""
    wait_seconds: Wait
    """How long to wait for the answer; then the request is taken back."""


class EndParameters(RunParameters):
    """Ends a run."""

    wait_seconds: float = Field(default=0.0, ge=0, le=MOST_WAIT_SECONDS)
    """How long to wait for its end. 0: not at all."""


class Control(Config):
    """What steers a run."""

    run_id: str
    """The run's id."""
    state: str
    """`running`, `paused`, `ended` and the like."""
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
    """A run's pause."""

    since: float
    """The time since when it holds, in Unix seconds."""
    reason: str
    """The reason as it was given."""


@reads("/jobs/{job}/runs/{run}/control", "Shows whether a run is paused, which keys may change, and what has changed.")
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


class JobParameters(Config):
    """Names a job."""

    job: str
    """The job's id."""


class JoinParameters(JobParameters):
    """Starts a guest."""

    text: str = Field(max_length=LONGEST_FILE)
    """The run's TOML file. What it names by import path is run, with the rights of `counterpoint serve`."""
    resume: bool = False
    """Go on from the run's newest checkpoint."""


class UrlParameters(JobParameters):
    """Names a server."""

    url: str = Field(max_length=500)
    """The base URL, `http://HOST:PORT`."""


class Servers(Config):
    """The job's servers, by URL."""

    servers: list[Server]
    """One entry a server."""


def _join(jobs: Jobs, asked: JoinParameters) -> Joined:
    if WORKER_VARIABLE in os.environ:
        raise ChangeForbidden(
            "this server is a worker of the job, and what it starts would end with it",
            advice="start the guest with `counterpoint orchestrator FILE --join DIRECTORY`, or use a server of its own",
        )
    return join_run(jobs.get(asked.job).directory, asked.text, resume=asked.resume, timeout=JOIN_SECONDS)


@reads("/jobs/{job}/servers", "Lists the job's inference servers.")
def _list(jobs: Jobs, asked: JobParameters) -> Servers:
    return Servers(servers=[_shown(server) for server in list_servers(jobs.get(asked.job).directory)])


def _shown(server: Server) -> Server:
    """The server; runs have written why it does not serve."""
    used_by = [name_of(run) for run in server.used_by]
    return server.model_copy(update={"reason": name_of(server.reason), "used_by": used_by})


class VerbEntry(Config):
    """A verb, as the page's button needs it."""

    name: str
    """The name in the path of its endpoint."""
    summary: str
    """What it does, in one sentence."""
    explanation: str
    """The text that says what will happen."""
    label: str
    """The text of a button."""
    when: str
    """The state in which it applies, such as `paused`; empty: in any."""
    asks_first: bool
    """Whether a person is asked before it acts."""
    needs_reason: bool
    """Whether a person is to give a reason."""
    is_dangerous: bool
    """Whether no further verb begins again what it ends."""
    has_request_id: bool
    """Whether it takes a `request_id`."""
    wait_seconds: float
    """How long its answer is waited for, unless the request says otherwise."""
    fields: dict[str, Any]
    """What else it is asked with: JSON schemas by name."""


class VerbTable(Config):
    """What may be done to a job."""

    runs: list[VerbEntry]
    """What can be done to a run of it."""
    servers: list[VerbEntry]
    """What can be done to a server of it."""


def _parameters_of(verb: Verb) -> tuple[type[RunParameters], list[str]]:
    """Returns the parameters of a verb on a run, and the names of those that its function is asked with."""
    asked = verb.fields()
    names = [] if asked is None else [name for name in asked.model_fields if name not in RunRequest.model_fields]
    fields: dict[str, Any] = {}
    for name in names:
        field = asked.model_fields[name]
        default = ... if field.is_required() else field.default
        described = Field(default, description=docstring_of(asked, name))
        fields[name] = (Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation, described)
    wait = signature(verb.load()).parameters.get("wait_seconds")
    base: type[RunParameters] = RunParameters if wait is None else EndParameters
    if wait is not None and wait.default is not None:
        base, fields["wait_seconds"] = RequestParameters, (Wait, wait.default)
    name = f"{verb.name.title()}Parameters"
    return create_model(name, __base__=base, __doc__=verb.explanation, __module__=__name__, **fields), names


def _of_run(verb: Verb) -> Endpoint[Any, Any]:
    """Returns the endpoint of a verb on a run. It answers with what has come of it."""
    act, asked = verb.load(), verb.fields()
    parameters, names = _parameters_of(verb)
    waiting = {"wait_seconds"} & parameters.model_fields.keys()

    def answer(jobs: Jobs, given: Any) -> Any:
        job = jobs.get(given.job)
        job.run_directory(given.run)
        values = {name: getattr(given, name) for name in names}
        if getattr(given, "request_id", None) is not None:
            values["request_id"] = given.request_id
        return act(job.directory, given.run, *([asked(**values)] if asked else []), **given.model_dump(include=waiting))

    return Endpoint(
        "POST", f"/jobs/{{job}}/runs/{{run}}/{verb.name}", sentence_of(verb), parameters,
        get_type_hints(act)["return"], answer, "change",
        seconds=LONGEST_PROFILE_SECONDS + MOST_WAIT_SECONDS + SPARE_SECONDS, is_urgent=verb.is_urgent,
    )  # fmt: skip


def _of_server(verb: Verb) -> Endpoint[Any, Any]:
    """Returns the endpoint of a verb on a server. It answers with all servers."""
    act = verb.load()

    def answer(jobs: Jobs, asked: UrlParameters) -> Servers:
        act(jobs.get(asked.job).directory, asked.url)
        return _list.answer(jobs, JobParameters(job=asked.job))

    return Endpoint(
        "POST", f"/jobs/{{job}}/servers/{verb.name}", sentence_of(verb), UrlParameters, Servers, answer, "change",
        seconds=30.0,
    )  # fmt: skip


def _entry(verb: Verb, parameters: type[Config], names: list[str]) -> VerbEntry:
    wait = parameters.model_fields.get("wait_seconds")
    properties = parameters.model_json_schema(schema_generator=Described)["properties"]
    shown = {name: value for name, value in verb._asdict().items() if name in VerbEntry.model_fields}
    return VerbEntry.model_validate(
        shown
        | {
            "summary": sentence_of(verb),
            "has_request_id": "request_id" in properties,
            "wait_seconds": 0.0 if wait is None else wait.default,
            "fields": {name: properties[name] for name in names},
        }
    )


@reads("/verbs", "Tells what may be done to a run and to a server.")
def _tell_verbs(jobs: Jobs, asked: NoParameters) -> VerbTable:
    return VerbTable(
        runs=[_entry(verb, *_parameters_of(verb)) for verb in RUN_VERBS],
        servers=[_entry(verb, UrlParameters, ["url"]) for verb in SERVER_VERBS],
    )


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (
    _tell_verbs,
    _inspect,
    *map(_of_run, RUN_VERBS),
    Endpoint(
        "POST",
        "/jobs/{job}/runs",
        "Starts a guest of a live job from the text of its file.",
        JoinParameters,
        Joined,
        _join,
        "change",
        seconds=JOIN_SECONDS + 30.0,
    ),
    _list,
    *map(_of_server, SERVER_VERBS),
)
