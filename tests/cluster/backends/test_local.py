"""The backend of one machine: what every backend must do, and what becomes of its agents."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from counterpoint.cluster.agent.remains import marked
from counterpoint.cluster.agent.settings import mark_of, read_endpoint
from counterpoint.cluster.backends.local import AGENTS, DEVICES, LocalBackend
from counterpoint.cluster.errors import ClusterError
from counterpoint.cluster.manager.events import Created, NodeLost, WorkerExited, WorkerReady
from tests.cluster.backends.contract import *  # noqa: F403
from tests.cluster.backends.contract import JOB, SERVICE, bundle, log_of, watch

pytestmark = pytest.mark.slow


class LocalWorld:
    """Backends over two nodes on this machine."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.job = JOB
        self.backends: list[LocalBackend] = []

    async def backend(self, epoch: int) -> LocalBackend:
        self.backends.append(LocalBackend(self.job, self.directory, epoch, nodes=2))
        return self.backends[-1]

    def agent(self, node: str) -> int:
        endpoint = read_endpoint(self.directory / AGENTS, node)
        assert endpoint is not None
        return endpoint.pid

    def processes(self, node: str) -> list[int]:
        return marked(mark_of(self.directory / AGENTS, node))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[LocalWorld]:
    made = LocalWorld(tmp_path)
    try:
        yield made
    finally:
        last = LocalBackend(JOB, tmp_path, 1000)
        await last.adopt({})
        await last.close(end=True)
        for backend in made.backends:
            await backend.close(end=False)
        assert not made.processes("node-0") + made.processes("node-1")


async def test_a_killed_agent_is_a_lost_node_and_its_place_is_used_again(world: LocalWorld) -> None:
    async with await watch(world) as master:
        await master.run("program-0")
        await master.run("program-1")
        node = (await master.get(Created, "program-0")).node
        other = (await master.get(Created, "program-1")).node
        assert node != other, "the one with more room is taken"
        os.kill(world.agent(node), signal.SIGKILL)
        lost = await master.get(NodeLost)
        assert lost.node == node
        assert not world.processes(node), "told only when nothing of it runs any more"
        await master.run("program-0", 2)
        assert (await master.get(Created, "program-0", 2)).node == node
        assert not master.of(WorkerExited)


async def test_a_frozen_agent_is_a_lost_node(world: LocalWorld) -> None:
    world.job = JOB.model_copy(update={"lease_seconds": 10.0})
    async with await watch(world) as master:
        await master.run("program-0")
        node = (await master.get(Created, "program-0")).node
        os.kill(world.agent(node), signal.SIGSTOP)
        assert "did not answer" in (await master.get(NodeLost)).reason
        assert not world.processes(node)


async def test_an_agent_that_was_told_to_end_is_replaced_for_the_next_worker(world: LocalWorld) -> None:
    async with await watch(world) as master:
        await master.run("program-0")
        agent = world.agent((await master.get(Created, "program-0")).node)
        os.kill(agent, signal.SIGTERM)
        assert (await master.get(WorkerExited, "program-0")).code == 7
        await master.backend.create(master.order("program-0", 2))
        await master.get(WorkerReady, "program-0", 2)
        assert world.agent((await master.get(Created, "program-0", 2)).node) != agent
        assert not master.of(NodeLost), "nothing was lost"


async def test_a_master_without_a_journal_finds_the_agents_by_their_files(world: LocalWorld) -> None:
    async with await watch(world) as first:
        await first.run("program-0")
        await first.backend.close(end=False)
    async with await watch(world, 2) as second:
        (living,) = await second.backend.adopt({})
        assert (living.worker, living.bundle) == ("program-0", "program-0")
        await second.backend.close(end=True)
        assert not world.processes(living.node)


async def test_a_master_finds_that_an_agent_died_meanwhile(world: LocalWorld) -> None:
    async with await watch(world) as first:
        await first.run("program-0")
        handles, node = first.backend.handles(), (await first.get(Created, "program-0")).node
        await first.backend.close(end=False)
    os.kill(world.agent(node), signal.SIGKILL)
    async with await watch(world, 2) as second:
        assert list(await second.backend.adopt(handles)) == []
        assert not world.processes(node)
        await second.backend.create(second.order("program-0", 2))
        assert (await second.get(Created, "program-0", 2)).node == node, "its bundle kept the place"


async def test_workers_get_accelerators_of_their_own(world: LocalWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICES, "3,4,7,9")
    show = f"import os\nprint('sees', os.environ['{DEVICES}'])\n{SERVICE}"
    async with await watch(world) as master:
        together = bundle("program-0", "program-1", gpu=1)
        await master.backend.allocate(together, ())
        for worker in ("program-0", "program-1"):
            await master.backend.create(master.order(worker, code=show, bundle=together.name))
            await master.get(WorkerReady, worker)
        seen = {log_of(world, worker).split()[1] for worker in together.needs}
        assert seen in ({"3", "4"}, {"7", "9"})
        with pytest.raises(ClusterError, match="gpu: wanted 3"):
            await master.backend.allocate(bundle("program-2", gpu=3), ())
