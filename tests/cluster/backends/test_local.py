"""The backend of one machine: what every backend must do, and what becomes of its agents."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.agent.remains import marked
from cluster.agent.settings import mark_of
from cluster.backends.local import AGENTS, LocalBackend
from tests.cluster.backends.contract import *  # noqa: F403
from tests.cluster.backends.contract import JOB

pytestmark = pytest.mark.slow


class LocalWorld:
    """Backends over two nodes on this machine."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.backends: list[LocalBackend] = []

    async def backend(self, epoch: int) -> LocalBackend:
        self.backends.append(LocalBackend(JOB, self.directory, epoch, nodes=2))
        return self.backends[-1]

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
