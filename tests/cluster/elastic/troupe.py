"""An ElasticMaster and its workers in threads of the test, with real calls between them; the test plays the PrimeMaster.

The checks and the ranks of a node can be stand-ins that need no torch: `FAKE_CHECK` is a command that answers as
`node_check` does, and `FakeRanks` obeys the test.
"""

from __future__ import annotations

import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from counterpoint.cluster.calls.caller import Caller
from counterpoint.cluster.calls.group import RoleGroup
from counterpoint.cluster.calls.server import CallServer
from counterpoint.cluster.calls.server_socket import call_address
from counterpoint.cluster.elastic.elastic_master import ElasticMaster
from counterpoint.cluster.elastic.elastic_worker import ElasticWorker
from counterpoint.cluster.worker import Context, Member, Stage, Worker
from counterpoint.transport.process.ranks.node import RanksOrder
from tests.support.polling import wait_until

ROLE = "trainer"


FAKE_CHECK = """
import json, os, sys
for line in sys.stdin:
    bad = os.path.exists(sys.argv[1])
    match json.loads(line):
        case {"measure": _}: said = {"rates": {"compute": 1.0}}
        case {"listen": _}: said = {"port": 1}
        case {"pair": _}: said = {"error": "no route"} if bad else {"seconds": 1.0}
    print(json.dumps(said), flush=True)
"""


class TroupeWorker(ElasticWorker):
    """Its node is bad while the file `bad-NAME` exists in the job's directory."""

    def check_command(self) -> Sequence[str]:
        file = Path(self.context.directory) / f"bad-{self.context.worker}"
        return [sys.executable, "-S", "-c", FAKE_CHECK, str(file)]


class FakeRanks:
    """Stands in for `RanksProcess`: its ranks run until the test, or SIGTERM, ends them."""

    started: ClassVar[list[FakeRanks]] = []
    """All of them, in order; for the test to clear."""

    def __init__(self, order: RanksOrder, listener: socket.socket | None) -> None:
        self.order, self.has_store = order, listener is not None
        if listener is not None:
            listener.close()
        self.joined, self.succeeded = True, False
        self.node_rank: int | None = 0
        self.failure: str | None = None
        self.code: int | None = None
        FakeRanks.started.append(self)

    def poll(self) -> int | None:
        return self.code

    def succeed(self) -> None:
        self.succeeded, self.code = True, 0

    def fail(self, reason: str) -> None:
        self.failure, self.code = reason, 1

    def terminate(self) -> None:
        self.code = 143

    def end(self, seconds: float) -> None:
        self.code = 143 if self.code is None else self.code
        self.close()

    def close(self) -> None:
        self.code = 137 if self.code is None else self.code
        shutil.rmtree(self.order.directory, ignore_errors=True)


@dataclass(slots=True)
class TroupeContext(Context):
    """A context whose job is a `Troupe`."""

    troupe: Any = None
    caller: Any = None

    def group(self, role: str) -> RoleGroup:
        group: RoleGroup = self.caller.group(role)
        return group

    def get_nodes_by_role(self, role: str) -> Sequence[Member]:
        members: Sequence[Member] = self.troupe.members()
        return members

    def replace(self, worker: str, incarnation: int, reason: str) -> None:
        self.troupe.replace(worker, incarnation, reason)

    def scale(self, count: int) -> None:
        self.troupe.scaled.append(count)

    def stop_job(self, reason: str, code: int = 0) -> None:
        self.troupe.stopped_for = reason
        self.stop.set()


@dataclass(slots=True)
class Life:
    """One incarnation of a worker: its object, its call server, and the thread of its `start`."""

    worker: Worker
    member: Member
    server: CallServer | None = None
    thread: threading.Thread | None = None
    error: BaseException | None = None


@dataclass(slots=True)
class Troupe:
    """The job."""

    directory: Path
    config: dict[str, Any]
    lives: dict[str, Life] = field(default_factory=dict)
    replaced: list[tuple[str, int, str]] = field(default_factory=list)
    stopped_for: str = ""
    scaled: list[int] = field(default_factory=list)
    on_replace: Callable[[], object] = lambda: None
    caller: Caller = field(default_factory=lambda: Caller(heartbeat_seconds=30.0))
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _absent: set[str] = field(default_factory=set)
    _all: list[Life] = field(default_factory=list)
    closing: bool = False

    def members(self) -> list[Member]:
        with self._lock:
            return [life.member for _, life in sorted(self.lives.items())]

    def context(self, name: str, incarnation: int) -> TroupeContext:
        rank = int(name.rpartition("-")[2]) if not name.endswith("master") else -1
        return TroupeContext(
            "job",
            ROLE,
            rank,
            3,
            name,
            incarnation,
            self.config,
            str(self.directory),
            "node",
            troupe=self,
            caller=self.caller,
        )

    def begin(self, rank: int) -> Life:
        """Creates a worker, or its next incarnation: READY, and its `start` runs at once, as in a running job."""
        name = f"{ROLE}-{rank}"
        with self._lock:
            before = self.lives.get(name)
            incarnation = before.member.incarnation + 1 if before else 1
            worker = TroupeWorker(self.context(name, incarnation))
            server = CallServer(worker, name, incarnation, call_address(self.directory, f"{name}.{incarnation}"))
            member = Member(name, incarnation, Stage.RUNNING, server.start(), "node")
            life = self.lives[name] = Life(worker, member, server)
            self._all.append(life)
            life.thread = threading.Thread(target=self._run, args=(life,), name=f"start-{name}")
            life.thread.start()
            self.caller.update(self.members())
            return life

    def _run(self, life: Life) -> None:
        try:
            life.worker.start()
        except BaseException as error:  # noqa: BLE001 - for the test to look at
            life.error = error
        with self._lock:
            life.member = replace(life.member, stage=Stage.FAILED if life.error else Stage.FINISH)

    def end(self, rank: int) -> None:
        """A worker dies: it takes no calls, and its processes end."""
        with self._lock:
            life = self.lives[f"{ROLE}-{rank}"]
            life.member = replace(life.member, stage=Stage.FAILED, address="")
            self.caller.update(self.members())
        self._bury(life)
        with self._lock:
            life.member = replace(life.member, stage=Stage.FAILED, address="")

    def _bury(self, life: Life) -> None:
        life.worker.context.stop.set()
        life.worker.stop()
        if life.server is not None:
            life.server.close()
        if life.thread is not None:
            life.thread.join(60)
            assert not life.thread.is_alive()

    def replace(self, worker: str, incarnation: int, reason: str) -> None:
        with self._lock:
            if self.closing or self.lives[worker].member.incarnation != incarnation:
                return
            if (worker, incarnation) in {(name, number) for name, number, _ in self.replaced}:
                return
            self.replaced.append((worker, incarnation, reason))
        threading.Thread(target=self._replace, args=(int(worker.rpartition("-")[2]),), name="replace").start()

    def _replace(self, rank: int) -> None:
        self.end(rank)
        self.on_replace()
        if not self.closing:
            self.begin(rank)

    def close(self, *masters: Life) -> None:
        self.closing = True
        wait_until(lambda: not any(thread.name == "replace" for thread in threading.enumerate()), "replacements")
        for life in (*masters, *self._all):
            self._bury(life)
        self.caller.close()

    def master(self, incarnation: int = 1) -> Life:
        """Starts the ElasticMaster: its `check_child` until no child was replaced by it, then its `start`."""
        master = ElasticMaster(self.context(f"{ROLE}-master", incarnation))
        life = Life(master, Member(f"{ROLE}-master", incarnation, Stage.RUNNING))

        def run() -> None:
            try:
                while True:
                    count = len(self.replaced)
                    master.check_child(self.members())
                    if len(self.replaced) == count or master.context.stop.is_set():
                        break
                    wait_until(lambda: all(member.address for member in self.members()), "the replaced")
                master.start()
            except BaseException as error:  # noqa: BLE001 - for the test to look at
                life.error = error

        life.thread = threading.Thread(target=run, name="master")
        life.thread.start()
        return life


@contextmanager
def troupe(directory: Path, count: int, **config: Any) -> Iterator[Troupe]:
    """`count` workers of a role with this config."""
    job = Troupe(directory, {"module": "train", "settle_seconds": 0.0, **config})
    try:
        for rank in range(count):
            job.begin(rank)
        yield job
    finally:
        job.close()


@contextmanager
def mastered(job: Troupe, incarnation: int = 1) -> Iterator[Life]:
    """The master until the block ends."""
    life = job.master(incarnation)
    try:
        yield life
    finally:
        life.worker.context.stop.set()
        assert life.thread is not None
        life.thread.join(60)
        assert not life.thread.is_alive()
