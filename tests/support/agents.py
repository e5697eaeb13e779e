"""Ends the agents that a killed command has left, and all below them, without the wait for their lease."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from counterpoint.cluster.agent.remains import marked
from counterpoint.cluster.agent.settings import mark_of
from counterpoint.cluster.agent.starting import agent_in
from counterpoint.cluster.attended.left_running import has_agents
from counterpoint.cluster.backends.local import AGENTS
from tests.support.polling import wait_until


def end_agents(control: Path) -> None:
    """Kills the agents of a job with that control directory; returns once nothing of them lives."""
    agents = control / AGENTS
    for path in agents.glob("*.json"):
        if (endpoint := agent_in(agents, path.stem)) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(endpoint.pid, signal.SIGKILL)
        mark = mark_of(agents, path.stem)
        wait_until(lambda: not marked(mark), "what the agent left to be gone")  # noqa: B023
    wait_until(lambda: not has_agents(control), "the agents to be gone")
