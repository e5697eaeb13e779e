"""Drains and adds inference servers of a live job: for all its runs, guests included, and over restarts.

The wishes are lines of `operator_servers.txt` in the job's directory, in the format of `inference.urls_file`; the pool of every
run watches it (`counterpoint/inference/pool/sources.py`). So an added server takes requests only after the ordinary proof of its
weights, and a drained one finishes those that it has. What has come of a wish is in each run's `fleet.json`
(`counterpoint/job/reading/activity/fleet.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from counterpoint.inference.config import check_url
from counterpoint.inference.pool.sources import OPERATOR_FILE, Listing, parse_listing
from counterpoint.inference.pool.sources import read_text as read_listing
from counterpoint.job.admin.ask import NotThere, Refused, await_lock, require_job
from counterpoint.job.directory import JOB_FILE, read_as
from counterpoint.job.reading.activity.fleet import join, read_views
from counterpoint.transport.config import Config
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import write_atomically

USE_SECONDS = 15.0
"""How long to wait for what the runs make of a server. A health check that gets no answer takes ten."""

POLL_SECONDS = 0.2

_NOBODY = "no run is at work"


class _Pool(BaseModel):
    """What is read of the servers that the configuration names."""

    urls: list[str] = Field(default_factory=list)
    urls_file: Path | None = None
    dns: str | None = None


class _Orchestrator(BaseModel):
    """What is read of the orchestrator."""

    inference: _Pool = Field(default_factory=_Pool)


class _Job(BaseModel):
    """What is read of `job.json`."""

    orchestrator: _Orchestrator = Field(default_factory=_Orchestrator)


class Server(Config, frozen=True):
    """What is wished of one server, and what has come of that."""

    url: str
    """The base URL of the server."""
    origin: Literal["job", "added"]
    """Whether the job's configuration names it, or somebody added it."""
    drained: bool
    """Whether its operator wishes it to get no new requests."""
    state: str
    """`out`, `unknown`, `draining`, `loading` or `serving`: the worst that a run at work says."""
    reason: str
    """Why it does not serve."""
    used_by: list[str]
    """The runs that give it requests."""

    @property
    def sentence(self) -> str:
        """Whether the runs use it, and if not, why and until when."""
        return f"{self.url}  {self._use}{'' if self.origin == 'job' else ', added by its operator'}"

    @property
    def _use(self) -> str:
        if self.drained:
            return "drained" + (f", and out of service ({self.reason})" if self.state == "out" else "")
        if self.state == "serving":
            return "in use"
        some = f"in use by {', '.join(self.used_by)}, and not by every run" if self.used_by else "not in use"
        advice = {"out": "; used once it answers and has proven its weights", "loading": "; used once they are proven"}
        return f"{some}: {self.reason}{advice.get(self.state, '')}"


def list_servers(job: Path) -> list[Server]:
    """Returns the job's servers, by URL. Those that a name of `inference.dns` leads to are missing unless drained or added."""
    require_job(job)
    own, wishes = _own(job), _wishes(job)
    now = time.time()
    views = [view for view in read_views(job) if view.is_current(now)]
    seen = {server.url: server for server in join(views)}
    servers = []
    for url in sorted({*own, *wishes}):
        found = seen.get(url)
        used_by = [] if found is None else [run for run, _, view in found.views if view.get("state") == "serving"]
        if not views:
            state, reason = "unknown", _NOBODY
        elif found is None or len(found.views) < len(views):
            state, reason = "unknown", "not every run has looked at it yet"
        else:
            state, reason = found.state, found.reason
        drained = bool(wishes.get(url, own.get(url, "")))
        servers.append(
            Server(
                url=url,
                origin="job" if url in own else "added",
                drained=drained,
                state=state,
                reason=reason,
                used_by=sorted(used_by),
            )
        )
    return servers


def await_use(job: Path, url: str, timeout: float = USE_SECONDS) -> Server:
    """Returns the server once every run at work uses it or says why not, or after `timeout`. Raises `NotThere`."""
    deadline = time.monotonic() + timeout
    while True:
        server = _server(job, url)
        if server.state in ("serving", "out") or server.reason == _NOBODY or time.monotonic() > deadline:
            return server
        time.sleep(POLL_SECONDS)


def drain_server(job: Path, url: str) -> Server:
    """Gives a server no new requests; those that it has finish. `undrain_server` takes it back.

    Raises `NotThere` for an unknown server, and `Refused` for the last one: to stop the generation, pause the runs.
    """
    with _changing(job) as wishes:
        url = _known(job, wishes, url)
        others = [each for each, reason in (_own(job) | wishes).items() if each != url and not reason]
        if not others and not _resolves_names(job):
            raise Refused(f"{url} is the last server that is not drained; to stop the generation, pause the runs")
        wishes[url] = "drained"
    return _server(job, url)


def undrain_server(job: Path, url: str) -> Server:
    """Gives a drained server requests again, after the ordinary proof of its weights. Raises `NotThere`."""
    with _changing(job) as wishes:
        url = _known(job, wishes, url)
        wishes[url] = ""
        if url in _own(job):
            del wishes[url]
    return _server(job, url)


def add_server(job: Path, url: str) -> Server:
    """Adds a server to the pools of all runs of the job. It gets the job's `api_key_file`, like every server of the job.

    Raises `UserError` for what is no URL of a server.
    """
    with _changing(job) as wishes:
        url = _checked(url)
        if url not in _own(job):
            wishes[url] = ""
        elif wishes.get(url):
            raise Refused(f"{url} is a server of the job already, and drained; undrain it")
    return _server(job, url)


def remove_server(job: Path, url: str) -> None:
    """Takes an added server away again; its requests finish. Raises `NotThere`, and `Refused` for one of the job's own."""
    with _changing(job) as wishes:
        url = _known(job, wishes, url)
        if url in _own(job):
            raise Refused(f"{url} is in the job's configuration; drain it instead")
        del wishes[url]


def _server(job: Path, url: str) -> Server:
    for server in list_servers(job):
        if server.url == url:
            return server
    raise NotThere(f"{url} is no server of the job in {job.absolute()} any more: somebody has just removed it")


def _checked(url: str) -> str:
    try:
        return check_url(url)
    except ValueError as error:
        raise UserError(str(error)) from None


def _known(job: Path, wishes: Listing, url: str) -> str:
    url, known = _checked(url), {**_own(job), **wishes}
    if url not in known and not _resolves_names(job):
        raise NotThere(
            f"{url} is no server of the job in {job.absolute()}; there are: {', '.join(sorted(known)) or 'none'}"
        )
    return url


def _own(job: Path) -> Listing:
    """The servers that the configuration names, at a fixed address or in a file."""
    pool = _pool(job)
    own: Listing = {url.rstrip("/"): "" for url in pool.urls}
    if pool.urls_file is not None:
        try:
            listed, _ = parse_listing(read_listing(pool.urls_file).decode())
        except (OSError, ValueError):
            listed = {}
        own |= listed
    return own


def _resolves_names(job: Path) -> bool:
    return _pool(job).dns is not None


def _pool(job: Path) -> _Pool:
    return read_as(_Job, job / JOB_FILE).orchestrator.inference


def _wishes(job: Path) -> Listing:
    path = job / OPERATOR_FILE
    try:
        listing, mistakes = parse_listing(read_listing(path).decode())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if mistakes:
        raise UserError(f"{path}:{mistakes[0][0]}: {mistakes[0][1]}; repair or remove it")
    return listing


@contextmanager
def _changing(job: Path) -> Iterator[Listing]:
    """Yields the wishes, by URL with the reason to drain; what the block makes of them is written. One process at a time."""
    require_job(job)
    lock = await_lock(job / f"{OPERATOR_FILE}.lock")
    try:
        wishes = _wishes(job)
        yield wishes
        lines = "".join(f"{'drain ' if reason else ''}{url}\n" for url, reason in sorted(wishes.items()))
        write_atomically(job / OPERATOR_FILE, lines.encode())
    finally:
        os.close(lock)
