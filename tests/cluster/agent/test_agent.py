"""An agent with real processes: what it starts, reports and ends, and that nothing is left whatever happens to it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from counterpoint.cluster.agent import protocol
from counterpoint.cluster.agent.starting import start_agent
from counterpoint.cluster.errors import BackendError
from counterpoint.transport.wires.endpoint import NODE_ADDRESS
from tests.cluster.agent.master import JOB, Master, Node, running_node
from tests.support.polling import wait_until

pytestmark = pytest.mark.slow

SERVICE = """
import signal, sys, time
from counterpoint.transport.process.notify import notify
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
notify("READY=1\\nSTATUS=serving")
time.sleep(600)
"""


def description(worker: str, **fields: object) -> dict[str, object]:
    role, _, rank = worker.rpartition("-")
    known = {"job": JOB, "role": role, "rank": int(rank), "count": 1, "worker": worker, "incarnation": 1}
    return known | {"import_path": "tests.cluster.worker_process.workers:Plain"} | fields


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


def test_a_worker_is_told_at_which_address_other_nodes_reach_its_own(tmp_path: Path) -> None:
    with running_node(tmp_path, listen="tcp://127.0.0.1") as node:
        master = node.master()
        master.command(protocol.CREATE, **node.order("role-0", f"import os; print(os.environ[{NODE_ADDRESS!r}])"))
        assert master.wait_for("WorkerExited", "role-0")["code"] == 0
        assert node.log("role-0").strip() == "127.0.0.1"


def test_a_folder_of_the_working_directory_does_not_stand_for_a_package_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many a project has a folder `cluster` or `transport`; `python -m` would look there first."""
    project = tmp_path / "project"
    for package in ("cluster", "transport"):
        (project / package).mkdir(parents=True)
        (project / package / "__init__.py").write_text("raise SystemExit('not ours')")
    monkeypatch.chdir(project)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    with running_node(tmp_path / "node") as node:
        assert node.processes == [node.endpoint.pid]


def test_a_process_that_has_not_beaten_yet_is_not_said_to_have(node: Node, tmp_path: Path) -> None:
    """From the first heartbeat on silence counts; loading may take much longer than the limit."""
    code = f"""
import os, time
from counterpoint.transport.process.notify import notify
open({str(tmp_path / "runs")!r}, "w").close()
while not os.path.exists({str(tmp_path / "go")!r}):
    time.sleep(0.02)
notify("READY=1")
time.sleep(600)
"""
    master = node.master()
    master.command(protocol.CREATE, **node.order("role-0", code, silence_timeout_seconds=30.0))
    master.wait((tmp_path / "runs").exists, "its process")
    master.command(protocol.ORDER, worker="role-0", incarnation=1, order={"kind": protocol.START})
    assert not any(beat["alive"] for beat in master.beats)
    (tmp_path / "go").touch()
    master.wait(
        lambda: any(beat["alive"] and beat["pid"] for beat in master.beats), "its first heartbeat, with its pid"
    )


def test_news_of_a_command_is_no_sign_of_life_and_told_to_the_next_master_as_well(node: Node) -> None:
    first = node.master()
    first.command(protocol.CREATE, **node.order("role-0", "import time; time.sleep(600)"))
    first.wait(lambda: any(beat["pid"] for beat in first.beats), "its process id")
    second = node.master(epoch=2)
    second.wait(lambda: second.beats, "the news")
    assert second.beats[-1]["pid"] == first.beats[-1]["pid"]
    assert not any(beat["alive"] for beat in (*first.beats, *second.beats))


def test_a_worker_of_a_class_goes_through_its_hooks(node: Node, tmp_path: Path) -> None:
    master = node.master()
    master.command(protocol.CREATE, **node.order("role-0", description=description("role-0", directory=str(tmp_path))))
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


STUBBORN = """
import signal, time
from counterpoint.transport.process.notify import notify
signal.signal(signal.SIGTERM, signal.SIG_IGN)
notify("READY=1")
time.sleep(600)
"""

# A child in a session of its own, which keeps shared memory that its resource tracker must remove.
WITH_CHILD = """
import os, subprocess, sys, time
from multiprocessing.shared_memory import SharedMemory
from counterpoint.transport.process.notify import notify
memory = SharedMemory(create=True, size=4096)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("memory", memory.name, flush=True)
notify("READY=1")
time.sleep(600)
"""


def started(node: Node, worker: str = "role-0", code: str = SERVICE) -> Master:
    master = node.master()
    master.command(protocol.CREATE, **node.order(worker, code))
    master.wait_for("WorkerReady", worker)
    return master


def guardian_of(node: Node) -> int:
    (guardian,) = [pid for pid in node.processes if "launch.py" in command_line(pid)]
    return guardian


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def test_a_killed_worker_is_reported_with_its_signal(node: Node) -> None:
    master = started(node)
    master.wait(lambda: any(beat["pid"] for beat in master.beats), "the worker's own process")
    os.kill(max(beat["pid"] for beat in master.beats), signal.SIGKILL)
    assert master.wait_for("WorkerExited", "role-0")["code"] == 137


def test_a_worker_whose_guardian_is_killed_leaves_nothing_before_it_is_reported(node: Node) -> None:
    master = started(node, code=WITH_CHILD)
    memory = Path("/dev/shm") / node.log("role-0").split("memory ")[1].split()[0]
    assert memory.exists()
    os.kill(guardian_of(node), signal.SIGKILL)
    master.wait_for("WorkerExited", "role-0")
    assert node.processes == [node.endpoint.pid]
    assert not memory.exists()


def test_a_killed_agent_leaves_neither_sessions_nor_shared_memory(node: Node) -> None:
    started(node, code=WITH_CHILD)
    memory = Path("/dev/shm") / node.log("role-0").split("memory ")[1].split()[0]
    os.kill(node.endpoint.pid, signal.SIGKILL)
    wait_until(lambda: not node.processes, "the end of everything")
    assert not memory.exists()


def test_a_worker_that_cannot_be_started_is_reported(node: Node) -> None:
    master = node.master()
    order = node.order("role-0") | {"log_file": str(node.directory / "agents" / "n0.json" / "no")}
    master.command(protocol.CREATE, **order)
    assert "n0.json" in master.wait_for("CreateFailed", "role-0")["reason"]


def test_a_full_disk_under_the_log_is_reported_as_the_worker_s_end(node: Node) -> None:
    master = node.master()
    failing = "import os; os.write(1, b'x')"
    master.command(protocol.CREATE, **node.order("role-0", failing) | {"log_file": "/dev/full"})
    assert master.wait_for("WorkerExited", "role-0")["code"] == 1


def test_sigterm_stops_the_workers_in_order_and_reports_it(node: Node) -> None:
    master = started(node)
    os.kill(node.endpoint.pid, signal.SIGTERM)
    master.wait(lambda: "SIGTERM" in master.welcome.get("ending", ""), "the announcement", heartbeats=False)
    assert master.wait_for("WorkerExited", "role-0")["code"] == 7
    wait_until(node.ended, "the agent's end")
    assert not node.processes


def test_its_master_may_be_killed_and_the_next_one_finds_all(node: Node) -> None:
    first = started(node)
    first.close()
    second = node.master(epoch=2)
    second.wait(lambda: second.welcome, "the welcome")
    assert [worker["worker"] for worker in second.welcome["workers"]] == ["role-0"]
    second.wait_for("Created", "role-0")
    answer = second.command(protocol.STOP, worker="role-0", incarnation=1)
    assert answer["kind"] == protocol.DONE
    second.wait_for("WorkerExited", "role-0")


def test_of_two_masters_the_lower_one_is_told_and_not_obeyed(node: Node) -> None:
    first = started(node)
    second = node.master(epoch=2)
    second.wait(lambda: second.welcome, "the welcome")
    answer = first.command(protocol.KILL, worker="role-0", incarnation=1)
    assert (answer["kind"], answer["epoch"]) == (protocol.REFUSED, 2)
    assert any(other["id"] == 0 and other["epoch"] == 2 for other in first.answers), "told before it asked"
    assert second.command(protocol.CREATE, **node.order("role-0", SERVICE))["kind"] == protocol.DONE
    assert not second.events("WorkerExited", "role-0")


def test_a_second_agent_of_a_name_does_not_start(node: Node) -> None:
    with pytest.raises(BackendError, match="another agent n0 lives"):
        start_agent(node.settings.model_copy(update={"agent": "a2"}))
    assert not node.ended()


def test_without_a_master_it_stops_its_workers_and_ends_after_a_lease(node: Node) -> None:
    started(node)
    started(node, "role-1", STUBBORN)
    node.master(lease_seconds=1.0)  # says HELLO once
    wait_until(node.ended, "the agent's end")
    assert not node.processes
    assert not node.settings.endpoint_file.exists()


def test_a_frozen_agent_s_workers_end_after_two_leases_and_it_obeys_nobody_when_it_wakes(tmp_path: Path) -> None:
    with running_node(tmp_path, lease_seconds=5.0) as node:
        master = started(node)
        os.kill(node.endpoint.pid, signal.SIGSTOP)
        wait_until(lambda: node.processes == [node.endpoint.pid], "the end of the worker")
        assert "nothing was heard of the supervisor for 10 s" in node.log("role-0")
        number = master.send(protocol.CREATE, **node.order("role-1", SERVICE))
        os.kill(node.endpoint.pid, signal.SIGCONT)
        wait_until(node.ended, "the agent's end")
        master.read()
        assert {"kind": protocol.DONE, "id": number} not in master.answers
        assert not (tmp_path / "role-1.log").exists()
