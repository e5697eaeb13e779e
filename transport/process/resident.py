"""Measures processes, as the kernel counts: resident memory, CPU time, and which are stopped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from counterpoint.transport.process.launch import descendants

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int | None = None) -> int:
    """Returns the present resident bytes of this process, or of another. Raises `OSError` without `/proc`, or if it has ended."""
    with open(f"/proc/{pid or 'self'}/statm", "rb", buffering=0) as file:  # a `Path` takes thrice as long
        return int(file.read().split()[1]) * _PAGE_BYTES


def available_bytes() -> int | None:
    """Returns how many bytes of memory the machine and this process's cgroup have available; None if that is unknown."""
    found: list[int] = []
    with suppress(OSError):
        meminfo = Path("/proc/meminfo").read_text()
        found += [int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError):  # "max" is no limit; a cgroup of version 1 has no such file
        cgroup = Path("/sys/fs/cgroup")
        found.append(int((cgroup / "memory.max").read_text()) - int((cgroup / "memory.current").read_text()))
    return min(found, default=None)


def allowed_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns how many bytes of memory the machine has or, if that is less, this process's cgroup may have.

    Whatever is in use: a cgroup's use has the file cache, which mostly fills it.
    """
    found = [os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES]
    with suppress(OSError, ValueError):  # as above
        found.append(int((cgroup / "memory.max").read_text()))
    return min(found)


def peak_bytes() -> int:
    """Returns the largest number of resident bytes of this process so far. Raises `OSError` without `/proc`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def stopped_below(root: int) -> list[int]:
    """Returns the processes from `root` downwards that a signal (SIGSTOP) has stopped or a debugger holds."""
    return [pid for pid, fields in _fields_below(root) if fields[0] in ("T", "t")]


def cpu_seconds(root: int) -> float:
    """Returns the CPU time that `root`, the living processes below it, and those that they have waited for, have used."""
    return sum(sum(map(int, fields[11:15])) for _, fields in _fields_below(root)) / os.sysconf("SC_CLK_TCK")


def _fields_below(root: int) -> Iterator[tuple[int, list[str]]]:
    """Yields the living processes from `root` downwards, with the fields of proc_pid_stat(5) from the state on."""
    for pid in (root, *descendants(root)):
        with suppress(OSError):  # it has just ended
            yield pid, Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
