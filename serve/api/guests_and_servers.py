"""Changing a whole job over the API: guests that join it, and its inference servers. The functions are those of `job/admin/`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from job.admin.join import Joined, join_run
from job.admin.servers import JobServer, add_server, drain_server, list_servers, remove_server, undrain_server
from job.serving.config import WORKER_VARIABLE
from serve.endpoint import Endpoint, Refused
from serve.jobs import Jobs
from serve.readers.rollouts.view import name_of
from transport.config import Config

JOIN_SECONDS = 60.0
LONGEST_FILE = 2**15
"""Characters of a run's file; the body of a request is bounded, too."""


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
    """`http://HOST:PORT`"""


class Server(Config):
    """What is wished of one server, and what has come of that."""

    url: str
    """Its base URL."""
    origin: Literal["job", "added"]
    """Whether the job's configuration names it, or somebody added it."""
    drained: bool
    """Whether it is to get no new requests."""
    state: str
    """`out`, `unknown`, `draining`, `loading` or `serving`: the worst that a run at work says."""
    reason: str
    """Why it does not serve."""
    used_by: list[str]
    """The runs that give it requests."""


class Servers(Config):
    """The job's servers, by URL."""

    servers: list[Server]
    """One entry a server."""


def _join(jobs: Jobs, asked: JoinParameters) -> Joined:
    if WORKER_VARIABLE in os.environ:
        raise Refused(
            "this server is a worker of the job, and what it starts would end with it",
            advice="start the guest with `counterpoint orchestrator FILE --join DIRECTORY`, or use a server of its own",
        )
    return join_run(jobs.get(asked.job).directory, asked.text, resume=asked.resume, timeout=JOIN_SECONDS)


def _list(jobs: Jobs, asked: JobParameters) -> Servers:
    return Servers(servers=[_shown(server) for server in list_servers(jobs.get(asked.job).directory)])


def _shown(server: JobServer) -> Server:
    """The server; runs have written why it does not serve."""
    used_by = [name_of(run) for run in server.used_by]
    return Server.model_validate(asdict(server) | {"reason": name_of(server.reason), "used_by": used_by})


def _verb(name: str, summary: str, act: Callable[[Path, str], JobServer | None]) -> Endpoint[Any, Any]:
    """Returns the endpoint that does `act` to a server. It answers with all servers."""

    def answer(jobs: Jobs, asked: UrlParameters) -> Servers:
        act(jobs.get(asked.job).directory, asked.url)
        return _list(jobs, JobParameters(job=asked.job))

    return Endpoint(
        "POST", f"/jobs/{{job}}/servers/{name}", summary, UrlParameters, Servers, answer, "change", seconds=30.0
    )


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (
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
    Endpoint("GET", "/jobs/{job}/servers", "Lists the job's inference servers.", JobParameters, Servers, _list),
    _verb("drain", "Gives a server no new requests; those that it has finish.", drain_server),
    _verb("undrain", "Gives a drained server requests again.", undrain_server),
    _verb("add", "Adds a server to the pools of all runs of the job.", add_server),
    _verb("remove", "Takes an added server away again.", remove_server),
)
