"""`usage.jsonl`: what each process of a job takes of its machine, as its supervisor measures it, for `serve`.

A worker counts with its descendants, such as a server's engine. What runs on other machines is not measured.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from counterpoint.cluster.devices import ask_nvidia
from counterpoint.cluster.worker_view import State, WorkerView
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.json_lines import append_line

USAGE_FILE = "usage.jsonl"

EVERY_SECONDS = 5.0
MOST_BYTES = 2**23
"""The size at which the older half is dropped; it then has half a day of a job of four workers."""

_TICKS, _PAGE_BYTES = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


class _Process(NamedTuple):
    """A process, as the kernel counts it."""

    parent: int
    ticks: int
    """The CPU time that it has had."""
    started: int
    """The tick of its start, which tells it from another one of its id."""
    resident: int
    """Pages in memory."""


class UsageFile:
    """The file of one job. One caller at a time; it measures at most every `EVERY_SECONDS`."""

    def __init__(self, directory: Path, backend: str) -> None:
        """`directory` and `backend` are the job's."""
        self.path = directory / USAGE_FILE
        self._is_local = backend == "local"
        self._looked, self._before = float("-inf"), dict[int, _Process]()
        self._thread: Thread | None = None
        self._trouble: OSError | None = None

    def write(self, state: State, workers: Sequence[WorkerView]) -> None:
        """Begins to measure if it is time, in a thread of its own: `nvidia-smi` may hang. Raises an earlier `OSError`."""
        pids = {worker.name: worker.pid for worker in workers if worker.pid}
        if self._thread is not None and self._thread.is_alive():
            return
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise trouble
        if self._is_local and pids and time.monotonic() - self._looked >= EVERY_SECONDS:
            self._thread = Thread(target=self._try, args=(pids,), name="measuring", daemon=True)
            self._thread.start()

    def _try(self, pids: Mapping[str, int]) -> None:
        try:
            self.measure(pids)
        except OSError as error:
            self._trouble = error

    def measure(self, pids: Mapping[str, int]) -> None:
        """Appends a line of these processes, from the second time on: of CPU time the difference counts. Raises `OSError`."""
        now = time.monotonic()
        seconds, before = now - self._looked, self._before
        self._before, self._looked = _processes(), now
        if not before:
            return
        gpus, gpu_memory = map(_gpu_figures, ("gpu=index,utilization.gpu", "compute-apps=pid,used_gpu_memory"))
        children = defaultdict[int, list[int]](list)
        for pid, process in self._before.items():
            children[process.parent].append(pid)
        taken: dict[str, Any] = {}
        for name, pid in pids.items():
            tree = [pid] if pid in self._before else []
            for each in tree:
                tree += [child for child in children[each] if child not in tree]  # an id may be used anew while we look
            ticks = sum(_ticks_since(self._before[each], before.get(each)) for each in tree)
            resident = sum(self._before[each].resident for each in tree)
            taken[name] = {"cpu": ticks / _TICKS / seconds, "memory": resident * _PAGE_BYTES}
            if gpu_memory:
                taken[name]["gpu_memory"] = 2**20 * sum(gpu_memory.get(each, 0) for each in tree)
        line = {"time": time.time(), "workers": taken, "gpus": {str(at): share / 100 for at, share in gpus.items()}}
        append_line(self.path, line)
        if self.path.stat().st_size > MOST_BYTES:
            newer = self.path.read_bytes()[-MOST_BYTES // 2 :]
            write_atomically(self.path, newer[newer.find(b"\n") + 1 :])


def _ticks_since(process: _Process, before: _Process | None) -> int:
    return process.ticks - (before.ticks if before is not None and before.started == process.started else 0)


def _processes() -> dict[int, _Process]:
    """Returns the processes of this machine by their ids; none without `/proc`."""
    found: dict[int, _Process] = {}
    for pid in filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else []):
        with suppress(OSError, ValueError, IndexError):  # it has ended
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            parent, user, system, started, resident = (int(fields[at]) for at in (1, 11, 12, 19, 21))
            found[int(pid)] = _Process(parent, user + system, started, resident)
    return found


def _gpu_figures(query: str) -> Counter[int]:
    """Returns pairs of whole numbers that `nvidia-smi` tells, equal firsts summed up; none without it."""
    figures = Counter[int]()
    for at, value in re.findall(
        rb"^ *(\d+) *, *(\d+) *$", ask_nvidia(query), re.MULTILINE
    ):  # else it says why it cannot
        figures[int(at)] += int(value)
    return figures
