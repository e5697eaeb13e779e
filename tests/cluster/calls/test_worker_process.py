"""Calls between real worker processes, whose backend tells them who is where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from counterpoint.cluster.backends.local import LocalBackend
from counterpoint.cluster.backends.order import WorkerOrder
from counterpoint.cluster.manager.events import WorkerExited, WorkerReady, WorkFinished
from counterpoint.cluster.master.orders import COMMAND
from counterpoint.cluster.member import Member, Stage
from counterpoint.cluster.spec import role_of
from tests.cluster.backends.contract import JOB, Watched, bundle
from tests.support.polling import until


def description(directory: Path, worker: str, count: int, incarnation: int = 1) -> dict[str, Any]:
    role, rank = role_of(worker), int(worker.rpartition("-")[2])
    known = {"job": "job", "role": role, "rank": rank, "count": count, "worker": worker, "incarnation": incarnation}
    return known | {"directory": str(directory), "import_path": f"tests.cluster.calls.workers:{role.title()}"}


@pytest.mark.slow
async def test_workers_call_each_other_and_outlive_a_death(tmp_path: Path) -> None:
    backend = LocalBackend(JOB, tmp_path, 1)

    def log() -> str:
        return (tmp_path / "logs" / "driver-0.log").read_text()

    async with Watched(backend, tmp_path) as master:

        async def create(worker: str, incarnation: int = 1) -> Member:
            own = description(tmp_path, worker, 2, incarnation)
            await backend.allocate(bundle(worker), ())
            log_file = str(tmp_path / "logs" / f"{worker}.log")
            await backend.create(WorkerOrder(worker, incarnation, worker, COMMAND, {}, log_file, description=own))
            ready = await master.get(WorkerReady, worker, incarnation)
            return Member(worker, incarnation, Stage.RUNNING, ready.address, "node-0", ready.server_key)

        workers = [await create(worker) for worker in ("scorer-0", "scorer-1", "driver-0")]
        assert all(member.address for member in workers)
        await backend.publish(workers)
        for member in workers:
            await backend.start(member.worker, 1)
        await until(lambda: "said blocked" in log(), "a call from the callee")
        await backend.kill("scorer-0", 1)
        await until(lambda: "said died" in log(), "the death to be noticed")
        await backend.publish([await create("scorer-0", 2)])
        await master.get(WorkFinished, "driver-0")
        said = [line for line in log().splitlines() if line.startswith("said")]
        assert said[:3] == ["said [2.0, 4.0, 6.0]", "said [2.0, 2.0]", "said blocked"]
        assert "scorer-0 (incarnation 1) died or is silent" in said[3]
        assert said[4:] == ["said [8.0]"]
        for worker, incarnation in (("driver-0", 1), ("scorer-1", 1), ("scorer-0", 2)):
            await backend.stop(worker, incarnation)
            assert (await master.get(WorkerExited, worker, incarnation)).code == 0
    await backend.close(end=True)
