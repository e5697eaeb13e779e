"""Supervision with real processes and real signals; above all: nothing is ever left behind."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from counterpoint.cluster.attended.attended_job import AttendedJob
from counterpoint.cluster.attended.left_running import has_workers
from counterpoint.cluster.job_files import read_job
from counterpoint.cluster.master.main import MasterProcess
from counterpoint.cluster.spec import JobSpec, RoleSpec
from counterpoint.cluster.state_file import StateError, read_state
from tests.support.keepers import end_keepers, keepers
from tests.support.polling import DEADLINE_SECONDS, wait_until

pytestmark = pytest.mark.slow

EARLIER_VERSION = Path(__file__).parent / "earlier_version" / "control"
"""What `AttendedJob` of an earlier version left when it was killed: one service and one task, `sleep 600`."""

SERVICE = """
import signal, sys, time
from counterpoint.transport.process.notify import notify
signal.signal(signal.SIGTERM, lambda *_: (print("drained", flush=True), sys.exit(143)))
notify("READY=1\\nSTATUS=serving")
time.sleep(600)
"""

STUBBORN = """
import signal, time
from counterpoint.transport.process.notify import notify
signal.signal(signal.SIGTERM, signal.SIG_IGN)
notify("READY=1")
time.sleep(600)
"""

# The classic daemon: forks, leaves its session, forks again, so that no parent, group or session leads to it.
DAEMONISE = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]])
    os._exit(0)
os.wait()
"""


class Supervised:
    """A running supervisor, its reports, and every process that carries the test's mark."""

    def __init__(self, directory: Path, workers: list[dict[str, Any]], reports: Path | None = None) -> None:
        self.directory = directory
        self.mark = f"mark-{directory}"
        for worker in workers:
            worker["command"] = [sys.executable, "-c", textwrap.dedent(worker["command"]), self.mark]
            worker["log_file"] = str(directory / f"{worker['name']}.log")
        self.workers = workers
        self.reports = reports or directory / "reports.jsonl"
        self._start()

    def resume(self) -> None:
        """Starts another supervisor after the first one was killed."""
        self.reports.unlink()
        self._start("adopt")

    def _start(self, *arguments: str) -> None:
        specification = self.directory / "workers.json"
        specification.write_text(json.dumps(self.workers))
        with self.reports.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.cluster.attended.attendant", str(specification), *arguments],
                stdout=output,
            )

    def lines(self) -> list[dict[str, Any]]:
        whole, _, _ = self.reports.read_bytes().rpartition(b"\n")
        return [json.loads(line) for line in whole.splitlines()]

    def state(self, name: str) -> dict[str, Any]:
        lines = [line for line in self.lines() if "workers" in line]
        view: dict[str, Any] = lines[-1]["workers"][name] if lines else {"state": "waiting", "pid": None, "status": ""}
        return view

    def finish(self) -> dict[str, Any]:
        """The outcome, once the supervisor has ended by itself."""
        self.process.wait(DEADLINE_SECONDS)
        outcome: dict[str, Any] = self.lines()[-1]["outcome"]
        return outcome

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def marked(self) -> list[int]:
        """Returns the keepers, the workers, and what these left."""
        return [*keepers(self.directory / "control"), *(pid for pid in every_pid() if self.mark in command_line(pid))]


def every_pid() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def command_line(pid: int) -> str:
    """Empty for a process that has ended, zombies included."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


Start = Callable[..., Supervised]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Supervised] = []

    def launch(*workers: dict[str, Any], reports: Path | None = None) -> Supervised:
        started.append(Supervised(tmp_path, list(workers), reports))
        return started[-1]

    yield launch
    for supervised in started:
        supervised.process.kill()
        supervised.process.wait()
        end_keepers(supervised.directory / "control")
        wait_until(lambda: not supervised.marked(), "every process of the test to be gone")  # noqa: B023


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test that waits for its end."""
    monkeypatch.setenv("CLUSTER_LEASE", "5")


def service(name: str, command: str = SERVICE, **options: Any) -> dict[str, Any]:
    return {"name": name, "command": command, "ready_timeout_seconds": 60.0} | options


def ready(job: Supervised, *names: str) -> None:
    """Waits until the workers are ready and their own processes known."""
    for name in names:
        wait_until(lambda: job.state(name)["state"] == "ready" and bool(job.state(name)["pid"]), f"{name} to be ready")  # noqa: B023


def test_a_job_runs_to_its_end_in_order(start: Start) -> None:
    job = start(service("server"), {"name": "task", "command": "print('worked')", "after": ["server"], "task": True})
    assert job.finish() == {"code": 0, "reason": "done", "failed_worker": None}
    assert job.process.returncode == 0
    assert job.log("task") == "worked\n"
    assert job.log("server") == "drained\n"
    started = [line["workers"]["server"]["state"] for line in job.lines() if "workers" in line]
    seen = [state for state in dict.fromkeys(started) if state != "waiting"]  # which may pass before the first look
    assert seen == ["starting", "ready", "stopping", "stopped"]
    assert any(line["workers"]["server"]["status"] == "serving" for line in job.lines() if "workers" in line)
    assert job.marked() == []


def test_a_killed_service_is_started_again_and_the_task_lives_on(start: Start) -> None:
    command = SERVICE.replace("notify(", "print('started', *sys.argv[2:], flush=True); notify(", 1)
    job = start(
        service("server", command, max_restarts=1, restart_arguments=["--resume"]),
        service("task", task=True, after=["server"]),
    )
    ready(job, "server", "task")
    killed, task = job.state("server")["pid"], job.state("task")["pid"]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: job.state("server")["pid"] not in (None, killed), "another server")
    ready(job, "server")
    assert job.log("server").splitlines() == ["started", "started --resume"]
    server = job.state("server")
    assert (server["restarts"], server["last_death"], server["log_from"]) == (1, "was killed by SIGKILL", 0)
    assert job.state("task")["pid"] == task
    os.kill(server["pid"], signal.SIGKILL)
    assert job.finish() == {"code": 1, "reason": "server was killed by SIGKILL", "failed_worker": "server"}
    assert job.log("task") == "drained\n"
    assert job.marked() == []


def test_a_service_that_is_not_essential_may_be_killed_and_may_hang_in_the_end(start: Start, tmp_path: Path) -> None:
    go = tmp_path / "go"
    waiting = f"import os, time; notify('READY=1')\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)"
    options: dict[str, Any] = {"essential": False, "max_restarts": 0}
    job = start(
        service("killed", **options),
        service("stubborn", STUBBORN, stop_timeout_seconds=0.5, **options),
        service("task", f"from counterpoint.transport.process.notify import notify\n{waiting}", task=True),
    )
    ready(job, "killed", "stubborn", "task")
    os.kill(job.state("killed")["pid"], signal.SIGKILL)
    wait_until(lambda: job.state("killed")["state"] == "failed", "the service to be given up")
    assert job.state("task")["state"] == "ready"
    go.touch()
    assert job.finish() == {"code": 0, "reason": "done", "failed_worker": None}
    assert job.state("stubborn")["state"] == "failed"
    assert job.marked() == []


def test_what_a_killed_keeper_left_is_gone_before_the_worker_starts_again(start: Start) -> None:
    job = start(service("server", DAEMONISE + STUBBORN, max_restarts=1), service("task", task=True))
    ready(job, "server", "task")
    wait_until(lambda: len(job.marked()) >= 5, "keepers, workers and a daemon to be there")
    left = set(job.marked())
    worker = job.state("server")["pid"]
    os.kill(int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    wait_until(lambda: job.state("server")["pid"] not in (None, worker), "another server")
    ready(job, "server")
    task = {pid for pid in left if pid == job.state("task")["pid"] or "keeper/main.py" in command_line(pid)}
    wait_until(lambda: not (left - task) & set(job.marked()), "what the first one left to be gone")
    assert job.process.poll() is None


BEATS = """
import time
from counterpoint.transport.process.notify import Heartbeat, notify_ready
notify_ready()
heartbeat = Heartbeat()
while True:
    heartbeat.beat()
    time.sleep(0.05)
"""


def test_a_worker_that_is_stopped_is_killed_and_started_again(start: Start) -> None:
    job = start(
        service("server", BEATS, max_restarts=5, silence_timeout_seconds=3.0),
        service("task", task=True, after=["server"]),
    )
    ready(job, "server", "task")
    stopped, task = job.state("server")["pid"], job.state("task")["pid"]
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: job.state("server")["last_death"] == "was silent for 3 s and was killed", "its death")
    ready(job, "server")
    assert job.state("server")["pid"] != stopped
    assert job.state("task")["pid"] == task


TROUBLED = SERVICE.replace("import notify", "import Heartbeat, notify").replace(
    "time.sleep(600)", r"Heartbeat().report('its engine\nis stopped'); time.sleep(600)"
)


def test_what_a_worker_says_is_wrong_with_it_and_its_last_output_are_shown(start: Start, tmp_path: Path) -> None:
    fail = tmp_path / "fail"
    waits = f"import os, time\nwhile not os.path.exists({str(fail)!r}): time.sleep(0.01)\n"
    fails = waits + "print('the disk is full')\nraise SystemExit(4)"
    job = start(service("server", TROUBLED), {"name": "task", "command": fails, "task": True})
    wait_until(lambda: job.state("server").get("trouble") == "its engine is stopped", "its trouble")
    fail.touch()
    job.finish()
    assert (job.state("task")["last_output"], job.state("server")["trouble"]) == ("the disk is full", "")


def test_why_a_command_ends_is_its_own_word_and_the_second_time_the_last(start: Start) -> None:
    says = "from counterpoint.transport.process.notify import notify_failure\nnotify_failure('no\\nmodel')\n"
    fails = f"{says}print('noise')\nraise SystemExit(4)"
    server = {"name": "server", "command": fails, "max_restarts": 5, "ready_timeout_seconds": 60.0}
    job = start(server, service("task", task=True, after=["server"]))
    outcome = job.finish()
    assert outcome == {"code": 4, "reason": "server ended with exit code 4: no model", "failed_worker": "server"}
    state = job.state("server")
    assert (state["restarts"], state["last_output"]) == (1, "")
    assert state["last_death"] == "ended with exit code 4: no model"


SHARES_MEMORY = (
    """
import multiprocessing, sys, time
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
"""
    + SERVICE
)


def test_the_shared_memory_of_what_is_killed_is_removed(start: Start, short_lease: None) -> None:
    job = start(service("server", SHARES_MEMORY), service("task", task=True))
    ready(job, "server")
    shared = Path("/dev/shm") / job.log("server").strip()
    assert shared.exists()
    job.process.send_signal(signal.SIGKILL)
    wait_until(lambda: not job.marked(), "the processes to be gone")
    assert not shared.exists()


def test_nothing_survives_a_keeper_and_its_supervisor_killed_one_after_the_other(
    start: Start, short_lease: None, tmp_path: Path
) -> None:
    job = start(service("server", STUBBORN), service("task", task=True))
    ready(job, "server", "task")
    owners = keepers(tmp_path / "control")
    assert len(owners) == 2
    for pid in (*owners, job.process.pid):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not job.marked(), "everything to be gone")


def test_what_a_killed_supervisor_left_goes_on_below_the_next_one(start: Start, tmp_path: Path) -> None:
    job = start(service("server"), service("task", task=True, after=["server"]))
    ready(job, "server", "task")
    before = [job.state(name)["pid"] for name in ("server", "task")]
    job.process.kill()
    job.process.wait()
    job.resume()
    wait_until(lambda: job.state("task")["state"] == "ready", "the job to be adopted")
    assert all(os.path.exists(f"/proc/{pid}") for pid in before)
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == {"code": 130, "reason": "interrupted by Ctrl-C", "failed_worker": None}
    assert job.log("server") == job.log("task") == "drained\n"
    assert job.marked() == []


def test_a_job_that_was_suspended_for_longer_than_its_lease_goes_on_at_no_cost(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is suspended as by Ctrl-Z: the keepers have stopped the workers in order meanwhile."""
    monkeypatch.setenv("CLUSTER_LEASE", "3")
    job = start(service("server"), service("task", task=True))
    ready(job, "server", "task")
    before = [job.state(name)["pid"] for name in ("server", "task")]
    job.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: not has_workers(tmp_path / "control"), "the end of the keepers")
    assert "drained" in job.log("server")
    assert "drained" in job.log("task")
    job.process.send_signal(signal.SIGCONT)

    def goes_on() -> bool:
        states = [job.state(name) for name in ("server", "task")]
        return all(one["state"] == "ready" and one["pid"] not in (*before, None) for one in states)

    wait_until(goes_on, "the workers to run again")
    assert job.state("task")["last_death"].startswith("was lost: ")
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == {"code": 130, "reason": "interrupted by Ctrl-C", "failed_worker": None}


def test_another_job_in_the_directory_of_a_killed_supervisor_begins_after_the_end_of_the_earlier_one(
    start: Start,
) -> None:
    job = start(service("server"), service("task", task=True, after=["server"]))
    ready(job, "server", "task")
    job.process.kill()
    job.process.wait()
    job.workers[1]["max_restarts"] = 7
    job.resume()
    ready(job, "server", "task")
    assert job.log("server") == job.log("task") == "drained\n"
    job.process.send_signal(signal.SIGINT)
    assert job.finish()["code"] == 130
    assert job.log("server") == job.log("task") == "drained\ndrained\n"


@pytest.mark.parametrize("left", ["damage", "the journal of an earlier version"])
def test_a_state_that_is_of_no_use_while_an_earlier_job_lives_is_said_and_the_keepers_end_by_themselves(
    start: Start, tmp_path: Path, short_lease: None, left: str
) -> None:
    job = start(service("server"), service("task", task=True))
    ready(job, "server", "task")
    job.process.kill()
    job.process.wait()
    state = tmp_path / "control" / "state.json"
    if left == "damage":
        state.write_bytes(b"no state")
        job.workers[1]["max_restarts"] = 7  # else the damage is refused, and no job begun
    else:
        state.unlink()
        shutil.copytree(EARLIER_VERSION / "journal", tmp_path / "control" / "journal")
        shutil.copy(EARLIER_VERSION / "master.json", tmp_path / "control" / "master.json")
    job.resume()
    ready(job, "server", "task")
    assert "drained" in job.log("server")
    job.process.send_signal(signal.SIGINT)
    assert job.finish()["code"] == 130


@pytest.mark.parametrize("adopt", [True, False])
async def test_a_job_that_an_earlier_version_left_is_begun_anew(tmp_path: Path, adopt: bool) -> None:
    control = tmp_path / "control"
    shutil.copytree(EARLIER_VERSION, control)
    spec = read_job(control).spec
    job = AttendedJob(spec, control)
    running = asyncio.create_task(job.run(adopt=adopt))
    async with asyncio.timeout(DEADLINE_SECONDS):
        while job.state != "running":
            assert not running.done(), running
            await asyncio.sleep(0.05)
    assert not (control / "journal").exists()
    assert [one.incarnation for one in read_state(control).job.workers.values()] == [1, 1]
    os.kill(os.getpid(), signal.SIGINT)
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert (await running).code == 130


async def test_a_submitted_job_that_an_earlier_version_left_is_refused_in_one_sentence(tmp_path: Path) -> None:
    control = tmp_path / "control"
    shutil.copytree(EARLIER_VERSION, control)
    with pytest.raises(
        StateError, match=r"control: the job has had a master, .* an earlier version of Counterpoint ran it"
    ):
        await MasterProcess(control, read_job(control)).run()


async def test_a_look_for_guests_that_hangs_does_not_hold_up_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("counterpoint.cluster.attended.attended_job.LOOK_SECONDS", 0.01)
    looks, go_on = 0, threading.Event()

    def hang() -> list[str]:
        nonlocal looks
        looks += 1
        go_on.wait(60)
        return ["guest"]

    spec = JobSpec(name="job", roles=(RoleSpec(name="work", command=("true",)),))
    job = AttendedJob(spec, tmp_path, guests=hang)
    assert await job.guests() is None
    assert await job.guests() is None
    assert looks == 1
    go_on.set()
    monkeypatch.setattr("counterpoint.cluster.attended.attended_job.LOOK_SECONDS", 60.0)
    async with asyncio.timeout(60):
        while (found := await job.guests()) is None:  # noqa: ASYNC110 - a thread
            await asyncio.sleep(0)
    assert found == ("guest",)


def test_sigint_drains_also_where_it_was_ignored(start: Start) -> None:
    """As it is in what a script's shell starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        job = start(service("server"), service("task", task=True))
    finally:
        signal.signal(signal.SIGINT, before)
    ready(job, "server", "task")
    job.process.send_signal(signal.SIGINT)
    assert job.finish()["code"] == 130


def test_ctrl_c_drains_in_order_though_the_state_cannot_be_written(
    start: Start, tmp_path: Path, short_lease: None
) -> None:
    job = start(service("server"), service("task", task=True, after=["server"]))
    ready(job, "server", "task")
    (tmp_path / "full").touch()
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == {"code": 130, "reason": "interrupted by Ctrl-C", "failed_worker": None}
    assert job.log("server") == job.log("task") == "drained\n"
    assert job.marked() == []
    assert not has_workers(tmp_path / "control")


def test_a_full_disk_is_waited_for_with_true_states_and_the_job_goes_on_in_place(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full for longer than the lease."""
    monkeypatch.setenv("CLUSTER_LEASE", "3")
    job = start(service("server", max_restarts=1), service("task", task=True, after=["server"], max_restarts=1))
    ready(job, "server", "task")
    first = job.state("server")["pid"]
    (tmp_path / "full").touch()
    began = time.monotonic()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: job.state("server")["state"] == "restarting", "the end of the server to be shown")
    assert (job.state("server")["pid"], job.state("task")["state"]) == (None, "ready")
    os.kill(job.state("task")["pid"], signal.SIGKILL)
    wait_until(lambda: job.state("task")["state"] == "exited", "the end of the task to be shown, too")
    wait_until(lambda: time.monotonic() > began + 5, "a lease to be over")
    (tmp_path / "full").unlink()
    ready(job, "server", "task")
    assert job.state("server")["pid"] != first
    troubles = [line["trouble"] for line in job.lines() if "trouble" in line]
    assert len(troubles) == 2, "one sentence, and its end"
    assert troubles[0].startswith(f"disk full at {tmp_path}/control: ")
    assert troubles[1] == ""
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == {"code": 143, "reason": "stopped by SIGTERM", "failed_worker": None}


def test_a_second_ctrl_c_kills(start: Start) -> None:
    job = start(service("server", STUBBORN), service("task", STUBBORN, task=True))
    ready(job, "server", "task")
    job.process.send_signal(signal.SIGINT)
    wait_until(lambda: job.state("task")["state"] == "stopping", "the task to be asked")
    while job.state("task")["state"] == "stopping":  # one within a second of another is taken for the same
        job.process.send_signal(signal.SIGINT)
        time.sleep(1.5)
    assert job.finish()["code"] == 130
    assert job.marked() == []


def test_a_worker_is_nice_and_gets_its_environment(start: Start) -> None:
    # In a group of its own, and in the supervisor's session: in another, its nice value would not count against it.
    groups = "os.getpgid(0) == os.getpid(), os.getsid(0) == os.getsid(os.getppid())"
    command = f"import os; print(os.nice(0), os.environ['GREETING'], {groups})"
    job = start({"name": "task", "command": command, "task": True, "nice": 7, "environment": {"GREETING": "hello"}})
    job.finish()
    assert job.log("task") == f"{os.nice(0) + 7} hello True True\n"


def test_a_worker_that_cannot_be_started_again_is_tried_again_and_the_others_live_on(
    start: Start, tmp_path: Path
) -> None:
    job = start(service("server", max_restarts=3), service("task", task=True, after=["server"]))
    ready(job, "server", "task")
    killed, task = job.state("server")["pid"], job.state("task")["pid"]
    (tmp_path / "server.log").unlink()
    (tmp_path / "server.log").mkdir()
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: "could not be started" in job.state("server")["last_death"], "a start that fails")
    (tmp_path / "server.log").rmdir()
    wait_until(lambda: job.state("server")["state"] == "ready", "the server's return")
    assert job.state("server")["restarts"] >= 2
    assert job.state("task")["pid"] == task
    job.process.send_signal(signal.SIGINT)
    assert job.finish()["code"] == 130
    assert job.log("task") == "drained\n"


def test_what_cannot_be_shown_ends_nothing(start: Start) -> None:
    job = start(
        service("server", max_restarts=3),
        {"name": "task", "command": "print('worked')", "after": ["server"], "task": True},
        reports=Path("/dev/full"),
    )
    job.process.wait(DEADLINE_SECONDS)
    assert job.log("task") == "worked\n"
    assert job.log("server") == "drained\n"
