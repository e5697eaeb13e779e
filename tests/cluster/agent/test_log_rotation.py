"""An agent keeps the output of its workers bounded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from counterpoint.cluster.agent import agent as agent_module
from counterpoint.cluster.agent import owned_process
from counterpoint.cluster.agent.agent import Agent
from counterpoint.cluster.agent.owned_process import OwnedProcess
from counterpoint.cluster.agent.settings import AgentSettings


async def test_full_logs_are_put_aside_and_one_that_cannot_be_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owned_process, "LOG_BYTES", 100)
    monkeypatch.setattr(agent_module, "ROTATION_SECONDS", 0.001)
    settings = AgentSettings(agent="a", job="job", node="node-0", name="n0", directory=tmp_path)
    router: Any = None
    agent = Agent(settings, router)
    (tmp_path / "target.log").write_text("of old\n" * 20)
    (tmp_path / "link.log").symlink_to(tmp_path / "target.log")
    (tmp_path / "server.log").write_text("of old\n" * 20)
    for worker in ("link", "server"):
        order = SimpleNamespace(worker=worker, log_file=str(tmp_path / f"{worker}.log"))
        process: Any = SimpleNamespace(order=order)
        process.rotate_log = lambda process=process: OwnedProcess.rotate_log(process)
        agent._processes[worker] = process
    rotating = asyncio.create_task(agent._rotate())
    async with asyncio.timeout(60):
        while not (tmp_path / "server.log.1").exists() or (tmp_path / "server.log").read_text():  # noqa: ASYNC110 - a thread writes them
            await asyncio.sleep(0.001)
    rotating.cancel()
    await asyncio.gather(rotating, return_exceptions=True)
    assert (tmp_path / "server.log.1").read_text() == "of old\n" * 20
    assert (tmp_path / "target.log").read_text() == "of old\n" * 20
