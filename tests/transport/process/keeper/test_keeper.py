"""A keeper with real processes, real signals, and peers and workers that do not keep to the protocol."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from counterpoint.transport.frames import BadFrame
from counterpoint.transport.process.keeper import main, messages
from counterpoint.transport.process.keeper.messages import MAX_MESSAGE, MESSAGES, MOST_SAID
from tests.support.polling import wait_until
from tests.transport.process.keeper.kept import SERVICE, is_alive, kept

pytestmark = pytest.mark.slow

OBEDIENT = SERVICE.replace("sys.exit(7)", "sys.exit(0)")
STUBBORN = SERVICE.replace("lambda *_: sys.exit(7)", "signal.SIG_IGN")

WITH_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("child", child.pid, flush=True)
"""


def child_in(log: str) -> int:
    return int(log.split("child ")[1].split()[0])


def test_it_imports_little() -> None:
    """Each worker waits for its keeper's start, and pays for its memory."""
    command = [sys.executable, "-I", "-S", "-X", "importtime", main.__file__, "no socket"]
    said = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False).stderr
    imported = {line.split("|")[-1].strip() for line in said.splitlines() if line.startswith("import time:")}
    assert {"socket", "counterpoint.transport.process.keeper.decisions"} <= imported, said
    assert not {"typing", "dataclasses", "logging", "asyncio", "zmq", "site"} & imported


def test_a_master_is_told_everything_and_the_keeper_ends_with_the_acknowledgement(tmp_path: Path) -> None:
    with kept(tmp_path) as keeper:
        keeper.master.wait_for(messages.READY)
        wait_until(lambda: any(beat["status"] for beat in keeper.master.said(messages.BEAT)), "its status")
        beat = keeper.master.said(messages.BEAT)[-1]
        assert (beat["status"], beat["pid"]) == ("serving", keeper.worker)
        keeper.master.send(messages.STOP)
        exited = keeper.master.wait_for(messages.EXITED)
        assert (exited["code"], exited["lost"]) == (7, False)
        assert keeper.process.poll() is None, "it waits for the acknowledgement"
        keeper.master.send(messages.ACKNOWLEDGE, number=exited["number"])
        keeper.wait_for_end()
        assert not keeper.path.exists()


def test_the_next_master_is_told_what_nobody_acknowledged_and_the_lower_one_is_refused(tmp_path: Path) -> None:
    with kept(tmp_path) as keeper:
        ready = keeper.master.wait_for(messages.READY)
        keeper.master.send(messages.ACKNOWLEDGE, number=ready["number"] - 1)
        second = keeper.peer()
        second.hello(2)
        facts = second.wait_for(messages.FACTS)
        assert (facts["worker"], facts["ready"], facts["lives"]) == ("w-0", True, True)
        assert second.wait_for(messages.READY) == ready
        assert not second.said(messages.CREATED)
        assert keeper.master.wait_for(messages.REFUSED)["epoch"] == 2
        keeper.master.wait_for_end()
        late = keeper.peer()
        late.hello(1)
        with suppress(BrokenPipeError):  # the keeper may have closed the connection by then
            late.send(messages.KILL)
        late.wait_for_end()
        assert late.said(messages.REFUSED)
        second.send(messages.LIFE)
        second.wait_for(messages.LIFE)
        assert is_alive(facts["pid"])


def test_without_a_master_the_worker_is_stopped_in_order(tmp_path: Path) -> None:
    with kept(tmp_path, OBEDIENT, lease_seconds=1.0) as keeper:
        keeper.master.wait_for(messages.CREATED)
        keeper.wait_for_end()  # its master is connected and shows no life
        exited = keeper.master.wait_for(messages.EXITED)
        assert exited["lost"]
        assert not keeper.path.exists()


def test_without_a_master_what_does_not_stop_is_killed_with_all_below_it(tmp_path: Path) -> None:
    with kept(tmp_path, WITH_CHILD + STUBBORN, lease_seconds=1.0) as keeper:
        worker = keeper.worker
        wait_until(lambda: "child" in keeper.log, "its child")
        keeper.master.socket.close()
        keeper.wait_for_end()
        assert not is_alive(worker)
        assert not is_alive(child_in(keeper.log))


def test_one_that_was_frozen_for_longer_than_its_lease_obeys_nobody(tmp_path: Path) -> None:
    with kept(tmp_path, OBEDIENT, lease_seconds=1.0) as keeper:
        keeper.master.wait_for(messages.CREATED)
        os.kill(keeper.process.pid, signal.SIGSTOP)
        time.sleep(1.5)
        keeper.master.hello(1)
        os.kill(keeper.process.pid, signal.SIGCONT)
        assert keeper.master.wait_for(messages.EXITED)["lost"]
        keeper.wait_for_end()


def test_one_without_an_order_ends(tmp_path: Path) -> None:
    with kept(tmp_path) as keeper:
        keeper.worker  # noqa: B018 - its order has come
    with kept(tmp_path, worker=None) as keeper:
        pass
    path = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as adopting:
        listener.bind(os.fspath(path))
        listener.listen(1)
        adopting.connect(os.fspath(path))
        adopting.sendall(MESSAGES.frame({"kind": messages.HELLO, "epoch": 2, "lease_seconds": 60.0}))
        command = [sys.executable, "-I", "-S", main.__file__, os.fspath(path)]
        subprocess.run(command, stdin=listener.fileno(), check=True, timeout=120)
    assert not path.exists()


def test_a_killed_keeper_takes_its_worker_along(tmp_path: Path) -> None:
    with kept(tmp_path) as keeper:
        worker = keeper.worker
        keeper.master.wait_for(messages.READY)
        keeper.process.kill()
        wait_until(lambda: not is_alive(worker), "the end of the worker")
        keeper.master.wait_for_end()


def test_one_with_an_owner_ends_with_it(tmp_path: Path) -> None:
    """The kernel sends SIGHUP when the owner ends."""
    with kept(tmp_path, owner=os.getpid()) as keeper:
        keeper.master.wait_for(messages.READY)
        keeper.process.send_signal(signal.SIGHUP)
        assert keeper.master.wait_for(messages.EXITED)["code"] == 137
        keeper.wait_for_end()  # though nobody has acknowledged that
        assert not is_alive(keeper.worker)


def test_the_end_of_a_worker_is_told_once_nothing_is_left_below(tmp_path: Path) -> None:
    with kept(tmp_path, WITH_CHILD + SERVICE) as keeper:
        keeper.master.wait_for(messages.READY)
        os.kill(keeper.worker, signal.SIGKILL)
        assert keeper.master.wait_for(messages.EXITED)["code"] == 137
        assert not is_alive(child_in(keeper.log))


def test_a_stopped_worker_is_killed_all_the_same(tmp_path: Path) -> None:
    with kept(tmp_path) as keeper:
        keeper.master.wait_for(messages.READY)
        os.kill(keeper.worker, signal.SIGSTOP)
        keeper.master.send(messages.KILL)
        assert keeper.master.wait_for(messages.EXITED)["code"] == 137


def test_a_command_that_cannot_be_started_says_why(tmp_path: Path) -> None:
    with kept(tmp_path, command=["/no/such/program"]) as keeper:
        assert keeper.master.wait_for(messages.EXITED)["code"] == 127
        assert "/no/such/program" in keeper.log
    with kept(tmp_path, environment={"A": "\0"}) as keeper:
        assert "null byte" in keeper.master.wait_for(messages.CREATE_FAILED)["reason"]


GARBAGE = (
    struct.pack(">I", MAX_MESSAGE + 1),
    MESSAGES._framing.frame(b"{"),
    MESSAGES._framing.frame(b"[]"),
    MESSAGES._framing.frame(b"[" * 100_000),
    MESSAGES.frame({"kind": "hello", "epoch": "1", "lease_seconds": 1.0}),
    MESSAGES.frame({"kind": "kill"}),
    MESSAGES.frame({"kind": "hello", "epoch": True, "lease_seconds": -1}),
)


def test_a_peer_that_talks_nonsense_loses_its_connection_alone(tmp_path: Path) -> None:
    with kept(tmp_path) as keeper:
        keeper.master.wait_for(messages.READY)
        for garbage in GARBAGE:
            peer = keeper.peer()
            peer.socket.sendall(garbage)
            peer.wait_for_end()
        idle = [keeper.peer() for _ in range(20)]  # more than it takes
        keeper.master.send(messages.LIFE)
        keeper.master.wait_for(messages.LIFE)
        assert is_alive(keeper.worker)
        assert len(idle) == 20


def test_a_peer_that_asks_and_does_not_read_costs_bounded_memory(tmp_path: Path) -> None:
    with kept(tmp_path) as keeper:
        keeper.master.wait_for(messages.READY)
        before = keeper.memory
        asking = MESSAGES.frame({"kind": messages.HELLO, "epoch": 2, "lease_seconds": 60.0}) * 1000
        peer = keeper.peer()
        peer.socket.settimeout(1.0)
        try:
            for _ in range(30):
                peer.socket.sendall(asking)
        except OSError:
            pass  # it was cut off, or is read no more
        assert keeper.memory - before < 32 * 2**20
        third = keeper.peer()
        third.hello(3)
        assert third.wait_for(messages.FACTS)["lives"]


BEGIN = """
import os, socket, time
from counterpoint.transport.process.keeper.messages import MAX_MESSAGE, MESSAGES, WORDS
from counterpoint.transport.process.notify import notify
control = socket.socket(fileno=int(os.environ["CLUSTER_CONTROL_FD"]))
ready = WORDS.frame({'kind': 'ready', 'address': '', 'server_key': ''})
"""

NONSENSE = (
    "control.sendall(MESSAGES.frame({'kind': 'ready', 'address': 'x' * (MAX_MESSAGE - 50), 'server_key': ''})[:9000])",
    "notify('MAINPID=' + '9' * 40)",
    "notify('MAINPID=\\u00b2'); notify('EXTEND_TIMEOUT_USEC=\\u00b2')",
    "control.sendall(WORDS.frame({'kind': 'stop_job', 'reason': '', 'code': True}))",
    "control.sendall(WORDS.frame({'kind': 'extend', 'seconds': float('nan')}))",
    "control.sendall(WORDS.frame({'kind': 'exited', 'code': 0, 'reason': '', 'lost': False}))",
    "control.sendall(b'\\xff' * 100_000)",
)

FLOODS = (
    "control.sendall(ready); many = WORDS.frame({'kind': 'alive', 'status': ''}) * 10_000\nwhile True: control.sendall(many)",
    "control.sendall(ready)\nwhile True: notify('WATCHDOG=1')",
    "control.sendall(ready); n = 0\nwhile True:\n  n += 1; control.sendall(WORDS.frame({'kind': 'extend', 'seconds': n / 2}))",
    "control.sendall(ready); n = 0\nwhile True:\n  n += 1\n"
    "  control.sendall(WORDS.frame({'kind': 'replace', 'worker': 'w' * 200_000, 'incarnation': n, 'reason': ''}))",
)


@pytest.mark.parametrize("deed", NONSENSE)
def test_a_worker_that_talks_nonsense_harms_only_itself(tmp_path: Path, deed: str) -> None:
    code = f"{BEGIN}{deed}\nprint('done', flush=True)\ntime.sleep(600)\n"
    with kept(tmp_path, code, description={"worker": "w-0"}) as keeper:
        wait_until(lambda: "done" in keeper.log, "the deed", details=lambda: keeper.log)
        keeper.master.send(messages.KILL)
        assert keeper.master.wait_for(messages.EXITED)["code"] == 137
        told = {message["kind"] for message in keeper.master.messages}
        assert told <= {messages.FACTS, messages.CREATED, messages.BEAT, messages.EXITED}


@pytest.mark.parametrize("flood", FLOODS)
@pytest.mark.parametrize("reads", [True, False])
def test_a_worker_that_never_stops_talking_costs_bounded_memory(tmp_path: Path, flood: str, reads: bool) -> None:
    with kept(tmp_path, BEGIN + flood, description={"worker": "w-0"}) as keeper:
        keeper.master.wait_for(messages.READY)
        before = keeper.memory
        for _ in range(20):
            time.sleep(0.05)
            if reads:
                keeper.master.read()
                keeper.master.messages.clear()
        assert keeper.memory - before < 64 * 2**20
        keeper.master.send(messages.KILL)
        keeper.master.wait_for(messages.EXITED)


def test_a_worker_that_does_not_read_is_killed_and_says_why(tmp_path: Path) -> None:
    with kept(tmp_path, f"{BEGIN}control.sendall(ready); time.sleep(600)", description={"worker": "w-0"}) as keeper:
        keeper.master.wait_for(messages.READY)
        large = {"kind": messages.MEMBERS, "members": ["x" * (MAX_MESSAGE // 2)]}
        for _ in range(20):
            keeper.master.send(messages.SEND, message=large)
        exited = keeper.master.wait_for(messages.EXITED)
        assert (exited["code"], exited["reason"]) == (137, "it did not read its control socket")


def test_what_is_too_long_is_refused_where_it_is_made() -> None:
    with pytest.raises(BadFrame):
        messages.WORDS.frame({"kind": "alive", "status": "x" * MOST_SAID})
    with pytest.raises(BadFrame):
        MESSAGES.frame({"kind": "alive", "status": b"x"})


def test_a_worker_gets_its_niceness_with_all_its_threads_and_children_once_it_is_ready(tmp_path: Path) -> None:
    """Until then the job waits for it."""
    starting = """
import os, subprocess, sys, threading, time
from counterpoint.transport.process.notify import notify
wait = threading.Event().wait
threading.Thread(target=wait, daemon=True).start()
child = subprocess.Popen(["sleep", "600"])
print(os.getpid(), threading.enumerate()[-1].native_id, child.pid, flush=True)
while not os.path.exists(sys.argv[0]):
    time.sleep(0.01)
notify("READY=1")
wait()
"""
    go = tmp_path / "go"
    code = f"import sys; sys.argv[0] = {str(go)!r}\n{starting}"

    def niceness() -> set[int]:
        return {os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in keeper.log.split()}

    own = os.getpriority(os.PRIO_PROCESS, 0)
    with kept(tmp_path, code, nice=3) as keeper:
        wait_until(lambda: len(keeper.log.split()) == 3, "its start", details=lambda: keeper.log)
        assert niceness() == {own}
        go.touch()
        keeper.master.wait_for(messages.READY)
        wait_until(lambda: niceness() == {own + 3}, "a lower priority", details=lambda: str(niceness()))
