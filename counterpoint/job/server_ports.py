"""The ports of a job's servers on this machine: chooses them where the file sets none, and holds them while the command lives.

A server claims its port when it starts, which may be long after the command's checks: a model is downloaded, an adapter is
fine-tuned first. So the command claims the ports itself (`counterpoint/inference/port_claim.py`), and jobs that start at once get
ports of their own. Another program may still listen there first. The server then ends with 75, and the next start finds another
port.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from pydantic import BaseModel, Field

from counterpoint.inference.port_claim import check_free, claimed
from counterpoint.job.config import JobConfig
from counterpoint.job.derive import set_ports
from counterpoint.job.directory import JOB_FILE, read_as
from counterpoint.job.sections import FIRST_PORT
from counterpoint.job.workers import needs_servers
from counterpoint.transport.errors import Obstructed, UserError
from counterpoint.transport.process.permanent_errors import is_permanent


class _Servers(BaseModel):
    """What is read of the servers."""

    port: int = Field(ge=1, le=65535)


class _WithServers(BaseModel):
    """What is read of `job.json`."""

    inference: _Servers


def as_started(job: JobConfig) -> JobConfig:
    """Returns the job with the port that its last start chose, if its file sets none; for a command beside it."""
    port = None if job.inference.port or not job.inference.replicas else _last_port(job)
    return job if port is None else job.with_port(port)


@contextmanager
def held_ports(job: JobConfig, *, left_running: bool) -> Iterator[JobConfig]:
    """Yields the job with the ports of its servers, which no other job of this machine gets during the block.

    `left_running`: its servers may live on after a command that was killed, at their ports.

    Raises `UserError` if servers could not listen at the ports that it sets, and its subclass `Obstructed` if one is in use.
    """
    servers = job.inference
    last = [] if servers.port or (port := _last_port(job)) is None else [port]
    if job.backend != "local" or not servers.replicas or not needs_servers(job):
        yield job if servers.port or not servers.replicas else job.with_port(*last or [FIRST_PORT])
        return
    if servers.port:
        candidates = [servers.port]
    else:
        candidates = last if last and left_running else [*last, *range(FIRST_PORT, 2**16 - servers.replicas + 1)]
    first, held = _held(job, candidates, left_running)
    with held:
        yield job.with_port(first)


def _held(job: JobConfig, candidates: Sequence[int], left_running: bool) -> tuple[int, ExitStack]:
    """Returns the first port of `candidates` from which on there are as many as the job has servers, and their claims."""
    host, count = job.inference.host, job.inference.replicas
    others = {*set_ports(job, {run.run_id: run for run in job.every_run}).values()}
    others |= {job.serve.port} if job.serve is not None else set()
    why: OSError | None = None
    for first in candidates:
        if not others.isdisjoint(range(first, first + count)):
            continue
        try:
            with ExitStack() as held:
                for port in range(first, first + count):
                    if not left_running:
                        check_free(host, port)
                    held.enter_context(claimed(host, port, "job"))
                return first, held.pop_all()
        except OSError as error:
            why = error
            if error.errno != errno.EADDRINUSE:
                break
    raise (UserError if why is not None and is_permanent(why) else Obstructed)(
        f"inference.port = {job.inference.port}: {'no port is free' if why is None else why.strerror}"
    )


def _last_port(job: JobConfig) -> int | None:
    """Returns the port of the last start; None without one, and where it cannot be read: the command says so where it matters."""
    try:
        return read_as(_WithServers, job.output_dir / JOB_FILE).inference.port
    except UserError:
        return None
