"""An agent with real processes: what it starts, reports and ends, and that nothing is left whatever happens to it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.agent import protocol
from tests.cluster.agent.master import JOB, Node, running_node
from tests.support.polling import wait_until

pytestmark = pytest.mark.slow

SERVICE = """
import signal, sys, time
from cluster.notify import notify
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
notify("READY=1\\nSTATUS=serving")
time.sleep(600)
"""


def description(worker: str, **fields: object) -> dict[str, object]:
    role, _, rank = worker.rpartition("-")
    known = {"job": JOB, "role": role, "rank": int(rank), "count": 1, "worker": worker, "incarnation": 1}
    return known | {"directory": "/", "import_path": "tests.cluster.worker_process.workers:Plain"} | fields


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with running_node(tmp_path) as started:
        yield started


def test_a_command_is_started_reported_and_stopped(node: Node) -> None:
    master = node.master()
    answer = master.command(protocol.CREATE, **node.order("role-0", SERVICE))
    assert answer["kind"] == protocol.DONE
    assert master.wait_for("Created", "role-0")["node"] == "node-0"
    master.wait_for("WorkerReady", "role-0")
    master.wait(lambda: any(beat["status"] == "serving" for beat in master.beats), "its status")
    master.command(protocol.ORDER, worker="role-0", incarnation=1, order={"kind": protocol.START})
    master.wait_for("WorkerStarted", "role-0")
    master.command(protocol.STOP, worker="role-0", incarnation=1)
    assert master.wait_for("WorkerExited", "role-0")["code"] == 7
    assert node.processes == [node.endpoint.pid]


def test_a_worker_of_a_class_goes_through_its_hooks(node: Node) -> None:
    master = node.master()
    master.command(protocol.CREATE, **node.order("role-0", description=description("role-0")))
    master.wait_for("WorkerReady", "role-0")
    master.wait(lambda: any(beat["status"] == "fine" for beat in master.beats), "its status")
    master.command(protocol.ORDER, worker="role-0", incarnation=1, order={"kind": protocol.START})
    master.wait_for("WorkerStarted", "role-0")
    master.wait_for("WorkFinished", "role-0")
    order = {"kind": protocol.FAILOVER, "notice": 3, "failed": []}
    master.command(protocol.ORDER, worker="role-0", incarnation=1, order=order)
    assert master.wait_for("FailoverDone", "role-0")["notice"] == 3
    master.command(protocol.STOP, worker="role-0", incarnation=1)
    assert master.wait_for("WorkerExited", "role-0")["code"] == 0
    said = [line for line in node.log("role-0").splitlines() if line.startswith("hook")]
    assert said == [f"hook {name}" for name in ("__init__", "setup", "self_check", "start", "on_failover", "stop")]


def test_a_killed_agent_leaves_nothing(node: Node) -> None:
    master = node.master()
    for worker in ("role-0", "role-1"):
        master.command(protocol.CREATE, **node.order(worker, SERVICE))
        master.wait_for("WorkerReady", worker)
    assert len(node.processes) == 5, "the agent, two guardians, two workers"
    os.kill(node.endpoint.pid, signal.SIGKILL)
    wait_until(lambda: not node.processes, "the end of everything")
