"""Calls between real worker processes, under an agent that passes on who is where."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from counterpoint.cluster.agent import protocol
from counterpoint.cluster.spec import role_of
from tests.cluster.agent.master import running_node


def description(directory: Path, worker: str, count: int, incarnation: int = 1) -> dict[str, Any]:
    role, rank = role_of(worker), int(worker.rpartition("-")[2])
    known = {"job": "job", "role": role, "rank": rank, "count": count, "worker": worker, "incarnation": incarnation}
    return known | {"directory": str(directory), "import_path": f"tests.cluster.calls.workers:{role.title()}"}


def found(ready: Mapping[str, Any], stage: str = "RUNNING") -> dict[str, Any]:
    names = ("worker", "incarnation", "address", "server_key")
    return {name: ready[name] for name in names} | {"stage": stage, "node": "node-0"}


@pytest.mark.slow
def test_workers_call_each_other_and_outlive_a_death(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        master = node.master()

        def create(worker: str, incarnation: int = 1) -> Mapping[str, Any]:
            own = description(tmp_path, worker, 2, incarnation)
            master.command(protocol.CREATE, **node.order(worker, incarnation=incarnation, description=own))
            return master.wait_for("WorkerReady", worker, incarnation)

        workers = {worker: found(create(worker)) for worker in ("scorer-0", "scorer-1", "driver-0")}
        assert all(worker["address"].startswith("ipc://") for worker in workers.values())
        master.command(protocol.PUBLISH, members=[*workers.values()])
        for worker in workers:
            master.command(protocol.ORDER, worker=worker, incarnation=1, order={"kind": protocol.START})
        master.wait(lambda: "said blocked" in node.log("driver-0"), "a call from the callee")
        master.command(protocol.KILL, worker="scorer-0", incarnation=1)
        master.wait(lambda: "said died" in node.log("driver-0"), "the death to be noticed")
        master.command(protocol.PUBLISH, members=[found(create("scorer-0", 2))])
        master.wait_for("WorkFinished", "driver-0")
        said = [line for line in node.log("driver-0").splitlines() if line.startswith("said")]
        assert said[:3] == ["said [2.0, 4.0, 6.0]", "said [2.0, 2.0]", "said blocked"]
        assert "scorer-0 (incarnation 1) died or is silent" in said[3]
        assert said[4:] == ["said [8.0]"]
        for worker, incarnation in (("driver-0", 1), ("scorer-1", 1), ("scorer-0", 2)):
            master.command(protocol.STOP, worker=worker, incarnation=incarnation)
            assert master.wait_for("WorkerExited", worker, incarnation)["code"] == 0
