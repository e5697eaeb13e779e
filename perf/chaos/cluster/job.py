"""A job of many roles, and what can be done to it: processes killed or stopped for a while, lost nodes, a full disk."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from counterpoint.cluster import JobBuilder, JobHandle, JobSpec, submit
from counterpoint.cluster.job_handle import GRACE_SECONDS
from perf.chaos.cluster.audit import MARK, ORPHANS, audit, command_line, environment_of, marked, parent_of
from perf.chaos.cluster.ray_nodes import PLACE, RayNodes
from perf.chaos.cluster.witness import Reader
from perf.chaos.cluster.workers import ENOUGH, MARKED, channel_config
from perf.chaos.report import Findings, kill

SOURCES, TRAINERS, SCORERS = 2, 2, 2
NODES = 2
LEASE_SECONDS = 4.0
SILENCE_SECONDS = 6.0
STILL_SECONDS = 180.0
"""A job that shows no life of each of its workers for so long stands still."""
END_SECONDS = 40.0
"""Longest time for the masters to end after the outcome, on a busy machine: each waits for its standby."""
DISK_BYTES = 8 * 2**20
POLL_SECONDS = 0.1

ROLES = {
    "channels": ("channels-0",),
    "watcher": ("watcher-0",),
    "scorer-master": ("scorer-master",),
    "scorer": ("scorer-0", "scorer-1"),
    "source": ("source-0", "source-1"),
    "trainer": ("trainer-0", "trainer-1"),
}
"""The workers by what a fault names."""
WORKERS = tuple(worker for workers in ROLES.values() for worker in workers)


class StandsStillError(RuntimeError):
    """A job that does not go on."""


def spec_of(directory: Path, environment: dict[str, str], on_ray: bool) -> JobSpec:
    """Returns the job: restart scopes worker, role and job, tasks and services, a SubMaster, calls and a channel."""
    here = "perf.chaos.cluster.workers"
    channel = channel_config(directory, SOURCES).model_dump(mode="json", exclude_none=True)
    common: dict[str, Any] = {
        "max_restarts": 1000,
        "silence_timeout_seconds": SILENCE_SECONDS,
        "stop_timeout_seconds": 10.0,
        "environment": environment,
        "resources": {"cpu": 0, "custom": {PLACE: 1.0} if on_ray else {}},
    }
    fed = {**common, "config": {"channel": channel}, "after": ("channels",), "task": True}
    return (
        JobBuilder("chaos", lease_seconds=LEASE_SECONDS)
        .role("channels", worker=f"{here}:Channels", **(common | {"config": {"channels": [channel]}}))
        .role("watcher", worker=f"{here}:Watcher", restart="job", **common)
        .role(
            "scorer",
            worker=f"{here}:Scorer",
            sub_master=f"{here}:ScorerMaster",
            count=SCORERS,
            restart="role",
            **common,
        )
        .role("source", worker=f"{here}:Source", count=SOURCES, **fed)
        .role("trainer", worker=f"{here}:Trainer", count=TRAINERS, **fed)
        .build()
    )


class ClusterJob:
    """One job in a directory of its own, with all that it may leave in there."""

    def __init__(self, place: Path, ray: RayNodes | None) -> None:
        self.mark = uuid.uuid4().hex
        self.place = place
        self.directory = place / "job"
        self.temporary = place / "tmp"
        self.temporary.mkdir(parents=True)
        self.directory.mkdir(mode=0o700)
        self.ray = ray
        self.disk = place / "disk"
        self.disk_error = _mounted(self.disk)
        self.witness = Reader(self.directory)
        self._paused: list[int] = []
        backend, options = ("local", {"nodes": NODES}) if ray is None else ("ray", {"address": ray.address})
        journal = None if self.disk_error else str(self.disk / "state")
        self._environment = {MARK: self.mark, "TMPDIR": str(self.temporary)}
        self._mastered = time.monotonic()
        with self._own_environment():
            spec = spec_of(self.directory, self._environment, ray is not None)
            self.handle: JobHandle = submit(spec, self.directory, backend, journal=journal, options=options)

    # --- the processes ---

    def one_of(self, target: str, chance: random.Random) -> str:
        """Returns what a fault's target stands for now: a worker of a role, a keeper or an actor, a node of Ray; or itself."""
        if target in ROLES:
            return chance.choice(ROLES[target])
        if target in ("keeper", "actor"):
            return f"{target} {chance.choice(WORKERS)}"
        return chance.choice(self.nodes) if target == "node" else target

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes of Ray that have a worker now."""
        if self.ray is None:
            return []
        actors = {pid for worker in WORKERS for pid in self.processes(f"actor {worker}")}
        return [name for name in self.ray.names if actors.intersection(self.ray.processes(name))]

    def processes(self, target: str) -> list[int]:
        """Returns the processes of a target as of `one_of`, or of all masters; none while it has none."""
        if target in ("masters", "master", "standby"):
            acting = self._acting_master()
            if self.ray is not None:  # it has none that waits
                is_there = target != "standby" and "MasterActor" in command_line(acting)
                return [acting] if is_there else []
            masters = [pid for pid in marked(self.mark) if "counterpoint.cluster.master" in command_line(pid)]
            return (
                masters if target == "masters" else [pid for pid in masters if (pid == acting) == (target == "master")]
            )
        what, _, whose = target.partition(" ")
        if what == "keeper":
            return [pid for pid in map(parent_of, self.processes(whose)) if "keeper/main.py" in command_line(pid)]
        if what == "actor":  # below it is a keeper, and below that the worker
            return [parent_of(parent_of(pid)) for pid in self.processes(whose)]
        if target in WORKERS:
            self.witness.read()
            pid = next((line[2] for line in reversed(self.witness.lines) if line[0] == target), 0)
            return [pid] if f"{MARK}={self.mark}".encode() in environment_of(pid) else []
        assert self.ray is not None, target
        return self.ray.processes(target)

    def left(self) -> list[int]:
        """Returns all processes of the job."""
        found = marked(self.mark)
        if self.ray is not None:  # Ray starts what is between its nodes and the workers, and has one job
            ours = ("WorkerActor", "MasterActor", "transport/process/keeper/main.py")
            found += [pid for pid in self.ray.all_processes() if any(part in command_line(pid) for part in ours)]
        return sorted(set(found))

    def _acting_master(self) -> int:
        with suppress(OSError, ValueError):
            return int(json.loads((self.directory / "master.json").read_text())["pid"])
        return 0

    def send(self, target: str, number: int) -> list[int]:
        """Sends a signal to each process of a target; returns those that there were."""
        pids = self.processes(target)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return pids

    def lose(self, node: str) -> None:
        """Kills all processes of a node, and takes away their shared memory, which no node that is lost leaves behind."""
        for pid in self.send(node, signal.SIGKILL):
            self._forget_memory(pid)

    def cut(self, node: str) -> None:
        """Cuts a node of Ray off from all others; `resume` plugs it in again."""
        assert self.ray is not None
        self.ray.cut(node)

    def pause(self, target: str) -> list[int]:
        """Stops a target's processes; `resume` has those that are left go on."""
        self._paused = self.send(target, signal.SIGSTOP)
        return self._paused

    def resume(self) -> None:
        """Has what was stopped go on, as far as it still lives."""
        living = set(self.left())
        for pid in self._paused:
            if pid in living:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        self._paused = []
        if self.ray is not None:
            self.ray.mend()

    # --- the disk ---

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """Leaves no byte free under the state for as long as the block lasts."""
        filler = self.disk / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        try:
            yield
        finally:
            filler.unlink()

    # --- progress ---

    def wait_for_life(self, what: str) -> None:
        """Waits until every worker has shown life, and records were committed, since this call; or the job has ended."""
        self.witness.read()
        began = len(self.witness.lines)

        def all_live() -> bool:
            self.witness.read()
            since = self.witness.lines[began:]
            alive = {line[0] for line in since if line[3] == "lives"}
            return (alive.issuperset(WORKERS) and any(line[3] == "commits" for line in since)) or self.has_ended()

        self.wait_until(what, all_live)

    def has_ended(self) -> bool:
        """Whether the job has an outcome."""
        return (self.directory / "outcome.json").exists()

    def wait_until(self, what: str, condition: Callable[[], bool]) -> None:
        """Raises `StandsStillError` after `STILL_SECONDS`."""
        deadline = time.monotonic() + STILL_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise StandsStillError(f"{self.directory}: waited {STILL_SECONDS:g} s for {what}")
            self._attend()
            time.sleep(POLL_SECONDS)

    def _attend(self) -> None:
        """Does what a job's surroundings do: `counterpoint wait` starts another master, whoever runs Ray another node."""
        if self.handle._master_lives() or self.has_ended():
            self._mastered = time.monotonic()
        elif time.monotonic() - self._mastered > GRACE_SECONDS:
            with self._own_environment():
                self.handle.start_master()
            self._mastered = time.monotonic()
        if self.ray is not None:
            for pid in self.ray.replace_lost():
                self._forget_memory(pid)

    def _forget_memory(self, pid: int) -> None:
        with suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/{MARKED}{self.place.name}-{pid}")

    @contextmanager
    def _own_environment(self) -> Iterator[None]:
        """Has the processes that are started in this block be known as the job's."""
        former = dict(os.environ)
        os.environ |= self._environment
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(former)

    # --- the end ---

    def ask_for_the_end(self) -> None:
        """Has the sources end."""
        (self.directory / ENOUGH).touch()

    def finish(self) -> Findings:
        """Waits for the end and audits."""
        with suppress(StandsStillError):  # the audit finds no outcome then
            self.wait_until("the end of the job", self.has_ended)
        deadline = time.monotonic() + END_SECONDS
        while self.left() and time.monotonic() < deadline:  # a master may still be on its way out
            self._attend()
            time.sleep(POLL_SECONDS)
        self.witness.read()
        memory = MARKED + self.place.name
        found = audit(self.directory, self.witness.lines, SOURCES, self.left(), self.temporary, memory)
        if self.ray is not None:
            found.faults[ORPHANS] += self.ray.left()
        return found

    def close(self) -> None:
        """Kills whatever is left, after the audit has seen it."""
        deadline = time.monotonic() + 20.0
        while (left := self.left()) and time.monotonic() < deadline:
            for pid in left:
                kill(pid)
            time.sleep(POLL_SECONDS)
        for name in os.listdir("/dev/shm"):
            if MARKED + self.place.name in name:
                os.unlink(f"/dev/shm/{name}")
        if not self.disk_error:
            subprocess.run(["umount", "--lazy", str(self.disk)], check=False)


def _mounted(disk: Path) -> str:
    """Mounts a small disk; returns why it could not."""
    disk.mkdir()
    if sys.platform != "linux" or shutil.which("mount") is None:
        return "there is no `mount` here"
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip() or f"mount ended with {done.returncode}"
