"""A job of many roles, and what can be done to it: processes killed or stopped for a while, lost nodes, a full disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cluster import JobBuilder, JobHandle, JobSpec, submit
from perf.chaos.cluster.audit import MARK, Findings, audit, command_line, marked
from perf.chaos.cluster.witness import Reader
from perf.chaos.cluster.workers import ENOUGH, MARKED, channel_config

SOURCES, TRAINERS, SCORERS = 2, 2, 2
NODES = 2
LEASE_SECONDS = 4.0
SILENCE_SECONDS = 6.0
STILL_SECONDS = 180.0
"""A job that shows no life of each of its workers for so long stands still."""
END_SECONDS = 40.0
"""Longest time for the masters to end after the outcome, on a busy machine: each waits for its standby."""
JOURNAL_BYTES = 8 * 2**20
POLL_SECONDS = 0.1

WORKERS = (
    "channels-0",
    "watcher-0",
    "scorer-master",
    "scorer-0",
    "scorer-1",
    "source-0",
    "source-1",
    "trainer-0",
    "trainer-1",
)


class StandsStillError(RuntimeError):
    """A job that does not go on."""


def spec_of(directory: Path, mark: str, nodes: int) -> JobSpec:
    """Returns the job: restart scopes worker, role and job, tasks and services, a SubMaster, calls and a channel."""
    here = "perf.chaos.cluster.workers"
    channel = channel_config(directory, SOURCES).model_dump(mode="json", exclude_none=True)
    common: dict[str, Any] = {
        "max_restarts": 1000,
        "silence_timeout_seconds": SILENCE_SECONDS,
        "stop_timeout_seconds": 10.0,
        "environment": {MARK: mark},
        "resources": {"cpu": 0},
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

    def __init__(self, place: Path, backend: str, *, full_disk: bool) -> None:
        self.mark = uuid.uuid4().hex
        self.place = place
        self.directory = place / "job"
        self.temporary = place / "tmp"
        self.temporary.mkdir(parents=True)
        self.directory.mkdir(mode=0o700)
        self.backend = backend
        self.disk = place / "disk"
        self.disk_error = _mounted(self.disk) if full_disk else "not asked for"
        self.witness = Reader(self.directory)
        self._paused: list[int] = []
        options = {"nodes": NODES} if backend == "local" else {}
        journal = None if self.disk_error else str(self.disk / "journal")
        former = dict(os.environ)
        os.environ |= {MARK: self.mark, "TMPDIR": str(self.temporary)}
        try:
            spec = spec_of(self.directory, self.mark, NODES)
            self.handle: JobHandle = submit(spec, self.directory, backend, journal=journal, options=options)
        finally:
            os.environ.clear()
            os.environ.update(former)

    # --- the processes ---

    def processes(self, target: str) -> list[int]:
        """Returns the processes of a target: master, standby, masters, agent, node, or a worker. Empty while it has none."""
        mine = {pid: command_line(pid) for pid in marked(self.mark)}
        masters = [pid for pid, command in mine.items() if "cluster.master" in command]
        acting = self._acting_master()
        match target:
            case "masters":
                return masters
            case "master":
                return [pid for pid in masters if pid == acting]
            case "standby":
                return [pid for pid in masters if pid != acting]
            case "agent-0" | "agent-1":
                return [pid for pid in mine if pid == self._agent(target.removeprefix("agent-"))]
            case "node-0" | "node-1":
                wanted = f"CLUSTER_AGENT={self.directory.resolve() / 'agents'}:{target}".encode()
                return [pid for pid in mine if wanted in _environment(pid)]
        self.witness.read()
        for line in reversed(self.witness.lines):
            if line[0] == target:
                return [pid for pid in mine if pid == line[2]]
        return []

    def _acting_master(self) -> int:
        with suppress(OSError, ValueError):
            return int(json.loads((self.directory / "master.json").read_text())["pid"])
        return 0

    def _agent(self, rank: str) -> int:
        with suppress(OSError, ValueError):
            return int(json.loads((self.directory / "agents" / f"node-{rank}.json").read_text())["pid"])
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
            with suppress(FileNotFoundError):
                os.unlink(f"/dev/shm/{MARKED}{self.place.name}-{pid}")

    def pause(self, target: str) -> list[int]:
        """Stops a target's processes; `resume` has those that are left go on."""
        self._paused = self.send(target, signal.SIGSTOP)
        return self._paused

    def resume(self) -> None:
        """Has what was stopped go on, as far as it still lives."""
        living = set(marked(self.mark))
        for pid in self._paused:
            if pid in living:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        self._paused = []

    # --- the disk ---

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """Leaves no byte free under the journal for as long as the block lasts."""
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
            time.sleep(POLL_SECONDS)

    # --- the end ---

    def ask_for_the_end(self) -> None:
        """Has the sources end."""
        (self.directory / ENOUGH).touch()

    def finish(self) -> Findings:
        """Waits for the end and audits."""
        with suppress(Exception):
            self.handle.wait(STILL_SECONDS)
        deadline = time.monotonic() + END_SECONDS
        while marked(self.mark) and time.monotonic() < deadline:  # a master may still be on its way out
            self.handle._master_lives()
            time.sleep(POLL_SECONDS)
        self.witness.read()
        return audit(self.directory, self.witness.lines, SOURCES, self.mark, self.temporary, MARKED + self.place.name)

    def close(self) -> None:
        """Kills whatever is left, after the audit has seen it."""
        deadline = time.monotonic() + 20.0
        while (left := marked(self.mark)) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
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
    command = ["mount", "-t", "tmpfs", "-o", f"size={JOURNAL_BYTES},mode=0700", "tmpfs", str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip() or f"mount ended with {done.returncode}"


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def new_place(parent: Path | None) -> Path:
    """Returns a new, short path for a job: the path of a socket is."""
    return Path(tempfile.mkdtemp(prefix="cc-", dir=parent))
