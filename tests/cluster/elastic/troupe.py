"""An ElasticMaster and its workers in threads of the test, with real calls between them; the test plays the PrimeMaster.

The check of a node is a stand-in that needs no torch; so are its ranks where a test asks for `FakeRanks`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from counterpoint.cluster.calls.caller import Caller
from counterpoint.cluster.calls.group import RoleGroup
from counterpoint.cluster.calls.server import CallServer, call_address
from counterpoint.cluster.elastic.elastic_master import ElasticMaster
from counterpoint.cluster.elastic.elastic_worker import ElasticWorker
from counterpoint.cluster.worker import Context, Member, Stage
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
    """Its node is bad while the file `bad-NAME.INCARNATION` exists in the job's directory."""

    def check_command(self) -> Sequence[str]:
        file = Path(self.context.directory) / f"bad-{self.context.worker}.{self.context.incarnation}"
        return [sys.executable, "-S", "-c", FAKE_CHECK, str(file)]


@dataclass(slots=True)
class TroupeContext(Context):
    """A context whose job is a `Troupe`."""

    troupe: Any = None

    def group(self, role: str) -> RoleGroup:
        group: RoleGroup = RoleGroup(role, self.troupe.caller)
        return group

    def get_nodes_by_role(self, role: str) -> Sequence[Member]:
        members: Sequence[Member] = self.troupe.members()
        return members

    def replace(self, worker: str, incarnation: int, reason: str) -> None:
        self.troupe.replaced[worker, incarnation] = reason

    def scale(self, count: int) -> None:
        self.troupe.scaled.append(count)

    def stop_job(self, reason: str, code: int = 0) -> None:
        self.troupe.stopped_for = reason
        self.stop.set()


@dataclass(slots=True)
class Life:
    """One incarnation of a worker, or of the master: its object, and the thread of its `start`."""

    worker: Any
    member: Member
    server: CallServer | None = None
    thread: threading.Thread | None = None
    error: BaseException | None = None

    def run(self) -> None:
        """Runs its `start` in a thread."""

        def start() -> None:
            try:
                self.worker.start()
            except BaseException as error:  # noqa: BLE001 - for the test to look at
                self.error = error
            self.member = replace(self.member, stage=Stage.FAILED if self.error else Stage.FINISH)

        self.thread = threading.Thread(target=start, name=self.member.worker)
        self.thread.start()

    def end(self) -> None:
        """It dies: it takes no calls, and its processes end."""
        self.worker.context.stop.set()
        self.worker.stop()
        if self.server is not None:
            self.server.close()
        self.join()
        self.member = replace(self.member, stage=Stage.FAILED, address="")

    def join(self) -> None:
        if self.thread is not None:
            self.thread.join(60)
            assert not self.thread.is_alive()


@dataclass(slots=True)
class Troupe:
    """The job."""

    directory: Path
    config: dict[str, Any]
    lives: dict[str, Life] = field(default_factory=dict)
    replaced: dict[tuple[str, int], str] = field(default_factory=dict)
    """Who was to be replaced, and why: by the test."""
    stopped_for: str = ""
    scaled: list[int] = field(default_factory=list)
    caller: Caller = field(default_factory=lambda: Caller(heartbeat_seconds=30.0))

    def members(self) -> list[Member]:
        return [life.member for _, life in sorted(self.lives.items())]

    def context(self, name: str, incarnation: int, rank: int) -> TroupeContext:
        own = (self.config, str(self.directory), "node")
        return TroupeContext("job", ROLE, rank, 3, name, incarnation, *own, troupe=self)

    def begin(self, rank: int) -> None:
        """Creates a worker, or its next incarnation: READY, and its `start` runs at once, as in a running job."""
        name = f"{ROLE}-{rank}"
        incarnation = self.lives[name].member.incarnation + 1 if name in self.lives else 1
        worker = TroupeWorker(self.context(name, incarnation, rank))
        server = CallServer(worker, name, incarnation, call_address(self.directory, f"{name}.{incarnation}"))
        life = Life(worker, Member(name, incarnation, Stage.RUNNING, server.start(), "node"), server)
        life.run()
        self.lives[name] = life
        self.caller.update(self.members())

    def end(self, rank: int) -> None:
        life = self.lives[f"{ROLE}-{rank}"]
        life.member = replace(life.member, stage=Stage.FAILED, address="")
        self.caller.update(self.members())
        life.end()

    def play_replacements(self) -> None:
        """Ends and begins whom the master wants replaced."""
        for name, incarnation in [*self.replaced]:
            if self.lives[name].member.incarnation == incarnation:
                rank = int(name.rpartition("-")[2])
                self.end(rank)
                self.begin(rank)


@contextmanager
def troupe(directory: Path, count: int, **config: Any) -> Iterator[Troupe]:
    """`count` workers of a role with this config."""
    job = Troupe(directory, {"module": "train", "settle_seconds": 0.0, **config})
    try:
        for rank in range(count):
            job.begin(rank)
        yield job
    finally:
        for life in job.lives.values():
            life.end()
        job.caller.close()


@contextmanager
def mastered(job: Troupe, incarnation: int = 1) -> Iterator[Life]:
    """The master until the block ends: its `check_child`, while the test plays replacements, and then its `start`."""
    name = f"{ROLE}-master"
    master = ElasticMaster(job.context(name, incarnation, -1))
    life = Life(master, Member(name, incarnation, Stage.RUNNING))
    try:
        while True:
            before = {*job.replaced}
            master.check_child(job.members())
            if {*job.replaced} == before:
                break
            job.play_replacements()
        life.run()
        yield life
    finally:
        life.end()


def until(life: Life, condition: Any, what: str) -> None:
    wait_until(condition, what, details=lambda: f"{life.worker.status()} {life.error!r}")
