"""Starts an agent on this machine, and ends one: the other end of `main.py`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from counterpoint.cluster.agent.protocol import MARK
from counterpoint.cluster.agent.remains import start_of
from counterpoint.cluster.agent.settings import AgentEndpoint, AgentSettings, lock_file, read_endpoint
from counterpoint.cluster.errors import BackendError
from counterpoint.transport.files.lock import holder_of
from counterpoint.transport.process.child import last_lines, own_environment, spawn

START_SECONDS = 60.0
"""Longest time from the start of an agent to its endpoint."""

POLL_SECONDS = 0.01


def spawn_agent(settings: AgentSettings) -> int:
    """Starts an agent in a session of its own; returns its process, a child of this one. Raises `OSError`."""
    settings.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    command = [sys.executable, "-P", "-m", "counterpoint.cluster.agent.main", settings.model_dump_json()]
    return spawn(command, settings.log_file, own_environment() | {MARK: settings.mark}, session=True, mode=0o600)


def start_steps(settings: AgentSettings) -> Iterator[AgentEndpoint | None]:
    """Starts an agent; yields None, after which the caller waits a moment, and at last its endpoint.

    Raises `BackendError`, with the end of its log, if it does not start.
    """
    try:
        pid = spawn_agent(settings)
    except OSError as error:
        raise BackendError(f"the agent of node {settings.node} could not be started: {error}") from error
    deadline = time.monotonic() + START_SECONDS
    while True:
        endpoint = read_endpoint(settings.directory, settings.name)
        if endpoint is not None and endpoint.agent == settings.agent:
            yield endpoint
            return
        late = time.monotonic() > deadline
        if start_of(pid) is None or late:
            how = f"did not start within {START_SECONDS:g} s" if late else "ended at once"
            if late:
                os.kill(pid, signal.SIGKILL)
            reap(pid)
            said = " | ".join(last_lines(settings.log_file, count=3)) or "nothing"
            raise BackendError(f"the agent of node {settings.node} {how}; its log {settings.log_file} says: {said}")
        yield None


def start_agent(settings: AgentSettings) -> AgentEndpoint:
    """Starts an agent and waits for it. Raises as `start_steps`. Blocks: not for an event loop."""
    for endpoint in start_steps(settings):
        if endpoint is not None:
            return endpoint
        time.sleep(POLL_SECONDS)
    raise AssertionError("unreachable")


def lives(endpoint: AgentEndpoint) -> bool:
    """Whether the agent's process lives on this machine."""
    return start_of(endpoint.pid) == endpoint.started


def agent_in(directory: Path, name: str) -> AgentEndpoint | None:
    """Returns the agent of that name that lives in the directory; None if none does.

    A copy of a job's directory names the agents of the original, which are none of its own: nobody holds the lock there.
    """
    endpoint = read_endpoint(directory, name)
    is_here = endpoint is not None and lives(endpoint) and holder_of(lock_file(directory, name)) is not None
    return endpoint if is_here else None


def reap(pid: int) -> None:
    """Forgets a child that has ended; somebody else's is left to them."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return
