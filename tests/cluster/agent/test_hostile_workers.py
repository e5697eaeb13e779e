"""Workers that do not keep to the protocol: each harms itself, and never its agent or the workers beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from counterpoint.cluster.agent import protocol
from tests.cluster.agent.master import Master, Node, running_node

pytestmark = pytest.mark.slow

BEGIN = """
import os, socket, time
from counterpoint.cluster.agent.protocol import MAX_MESSAGE, MESSAGES
from counterpoint.transport.process.notify import notify
control = socket.socket(fileno=int(os.environ["CLUSTER_CONTROL_FD"]))
"""

SOUND = "control.sendall(MESSAGES.frame({'kind': 'ready', 'address': '', 'server_key': ''}))"

NONSENSE = (
    "control.sendall(MESSAGES.frame({'kind': 'ready', 'address': 'x' * (MAX_MESSAGE - 50), 'server_key': ''}))",
    "notify('MAINPID=' + '9' * 40)",
    "notify('MAINPID=\\u00b2')",
    "control.sendall(MESSAGES.frame({'kind': 'stop_job', 'reason': '', 'code': True}))",
    "control.sendall(MESSAGES.frame({'kind': 'extend', 'seconds': float('nan')}))",
    "control.sendall(b'\\xff' * 100_000)",
)

FLOODS = (
    f"{SOUND}; many = MESSAGES.frame({{'kind': 'alive', 'status': ''}}) * 10_000\nwhile True: control.sendall(many)",
    f"{SOUND}\nwhile True: notify('WATCHDOG=1')",
)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with running_node(tmp_path) as started:
        yield started


def with_a_sound_worker(node: Node) -> Master:
    master = node.master()
    master.command(protocol.CREATE, **node.order("good-0", "import time; time.sleep(600)"), notifies=False)
    return master


def create(master: Master, node: Node, worker: str, deed: str) -> None:
    done = str(node.directory / f"{worker}.done")
    order = node.order(worker, f"{BEGIN}{deed}\nopen({done!r}, 'w').close()\ntime.sleep(600)\n")
    master.command(protocol.CREATE, **order, description={"worker": worker})


def require_that_the_agent_goes_on(master: Master) -> None:
    for notice in range(3):
        order = {"kind": protocol.FAILOVER, "notice": notice, "failed": []}
        answer = master.command(protocol.ORDER, worker="good-0", incarnation=1, order=order)
        assert answer["kind"] == protocol.DONE
    assert not master.events("WorkerExited", "good-0")


def test_a_worker_that_talks_nonsense_harms_only_itself(node: Node) -> None:
    master = with_a_sound_worker(node)
    bad = [f"bad-{number}" for number in range(len(NONSENSE))]
    for worker, deed in zip(bad, NONSENSE, strict=True):
        create(master, node, worker, deed)
    master.wait(lambda: all((node.directory / f"{worker}.done").exists() for worker in bad), "the deeds")
    require_that_the_agent_goes_on(master)
    for worker in bad:
        master.command(protocol.KILL, worker=worker, incarnation=1)
        master.wait_for("WorkerExited", worker)
    assert not {"StopRequested", "ExtensionRequested"} & {event for event, _ in master.reports.values()}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_worker_that_never_stops_talking_does_not_keep_its_agent_from_the_others(node: Node, flood: str) -> None:
    master = with_a_sound_worker(node)
    create(master, node, "bad-0", flood)
    master.wait_for("WorkerReady", "bad-0")
    require_that_the_agent_goes_on(master)
    master.command(protocol.KILL, worker="bad-0", incarnation=1)
    master.wait_for("WorkerExited", "bad-0")
