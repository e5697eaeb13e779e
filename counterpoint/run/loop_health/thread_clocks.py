"""Reads the kernel's data on this process's threads: how long each has run or waited for a CPU, and its present state.

All is read without releasing the GIL, in a few microseconds: with `os.pread` other threads could run between the reading of a
stack and of its thread's state. Linux only; elsewhere, and where `/proc` is closed, the answers are None.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from dataclasses import dataclass
from enum import Enum, auto


class Doing(Enum):
    """State of a thread."""

    RUNNING = auto()
    """The thread is on a CPU, or waits for one."""
    WANTING_GIL = auto()
    """Waiting for the GIL. The observer holds it, so every thread in Python code is in this state."""
    BLOCKED = auto()
    """Waiting for something else: time, a lock, a disk, a socket."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Clocks at one moment, in seconds since an arbitrary start."""

    loop_cpu: float | None
    """The CPU time of the loop's thread."""
    loop_delay: float | None
    """How long the loop's thread was ready to run without a CPU."""
    others_cpu: float
    """Time that all other threads ran, in total."""


_LINUX = sys.platform == "linux"
_ANSWER_BYTES = 256
_RUNTIME_BYTES = 1 << 20
"""Upper bound of the size of the interpreter's state, a static variable that contains the GIL."""

_SUSPECTS = 4
"""Number of threads that ran most, from which the blamed one is chosen."""


class ThreadClocks:
    """Clocks of all threads, with details of the loop's thread. The owner must close it."""

    def __init__(self, loop_thread: int) -> None:
        """`loop_thread` is the native id of the loop's thread."""
        self._loop_thread = loop_thread
        self._schedstat = _ProcFile(loop_thread, "schedstat")
        self._syscall = _ProcFile(loop_thread, "syscall")
        self._seen: dict[int, float] = {}
        """Last readings of the other threads' clocks, by native id."""
        self._turn = 0

    def close(self) -> None:
        """Closes the files."""
        self._schedstat.close()
        self._syscall.close()

    def read(self) -> Reading:
        """Returns the clocks now."""
        fields = self._schedstat.read().split()
        if len(fields) >= 2:
            cpu, delay = int(fields[0]) * 1e-9, int(fields[1]) * 1e-9
            return Reading(cpu, delay, time.process_time() - cpu)
        cpu_alone = _cpu_seconds(self._loop_thread)
        return Reading(cpu_alone, None, time.process_time() - (cpu_alone or 0.0))

    def doing(self) -> Doing | None:
        """Returns the state of the loop's thread while the caller holds the GIL. None if the kernel does not show it."""
        return _meaning(self._syscall.read())

    def watch(self, count: int) -> None:
        """Reads the clocks of the next `count` other threads, in turn: reading all every time would cost too much."""
        others = self._others()
        for _ in range(min(count, len(others))):
            self._turn = (self._turn + 1) % len(others)
            thread_id = others[self._turn].native_id or 0
            self._seen[thread_id] = _cpu_seconds(thread_id) or 0.0
        if len(self._seen) > 2 * len(others) + count:
            self._seen = {thread.native_id or 0: self._seen.get(thread.native_id or 0, 0.0) for thread in others}

    def busiest(self) -> threading.Thread | None:
        """Returns the other thread that has run most since its last reading and now waits for the GIL.

        None if none ran, or several did and none waits for the GIL: running alone is no proof, as numpy runs without it.
        """
        ran: list[tuple[float, threading.Thread]] = []
        for thread in self._others():
            cpu = _cpu_seconds(thread.native_id or 0)
            if cpu is not None:
                ran.append((cpu - self._seen.get(thread.native_id or 0, 0.0), thread))
                self._seen[thread.native_id or 0] = cpu
        ran.sort(key=lambda item: -item[0])
        suspects = [thread for seconds, thread in ran[:_SUSPECTS] if seconds > ran[0][0] / 4]
        wanting = [thread for thread in suspects if _doing(thread.native_id or 0) is Doing.WANTING_GIL]
        return wanting[0] if wanting else suspects[0] if len(suspects) == 1 else None

    def _others(self) -> list[threading.Thread]:
        not_these = (None, self._loop_thread, threading.get_native_id())
        return [thread for thread in threading.enumerate() if thread.native_id not in not_these]


def _cpu_seconds(thread_id: int) -> float | None:
    """Returns how long the thread of that native id has run, in seconds; None when it has ended.

    The clock's id is made as Linux defines it: `time.pthread_getcpuclockid` may crash for a thread that has just ended.
    """
    if not _LINUX:
        return None
    try:
        return time.clock_gettime(~thread_id << 3 | 6)
    except OSError:
        return None


def _doing(thread_id: int) -> Doing | None:
    file = _ProcFile(thread_id, "syscall")
    try:
        return _meaning(file.read())
    finally:
        file.close()


def _meaning(syscall: bytes) -> Doing | None:
    """Parses a thread's `/proc/.../syscall`: its state, or the system call's number and its arguments."""
    fields = syscall.split()
    if not fields or _RUNTIME is None:
        return None
    if fields[0] == b"running":
        return Doing.RUNNING
    # A futex inside the interpreter's own state is the GIL's; locks of programs are elsewhere.
    wants_gil = fields[0] != b"-1" and 0 <= int(fields[1], 16) - _RUNTIME < _RUNTIME_BYTES
    return Doing.WANTING_GIL if wants_gil else Doing.BLOCKED


class _ProcFile:
    """A file of a thread below `/proc`; empty if it does not exist. Read by a library handle that keeps the GIL."""

    def __init__(self, thread_id: int, name: str) -> None:
        self._buffer = ctypes.create_string_buffer(_ANSWER_BYTES)
        path = f"/proc/self/task/{thread_id}/{name}".encode()
        self._descriptor = _library.open(path, os.O_RDONLY | os.O_CLOEXEC) if _LINUX else -1

    def read(self) -> bytes:
        if self._descriptor < 0:
            return b""
        length = _library.pread(self._descriptor, self._buffer, _ANSWER_BYTES, ctypes.c_int64(0))
        return self._buffer.raw[: max(0, length)]

    def close(self) -> None:
        if self._descriptor >= 0:
            _library.close(self._descriptor)
            self._descriptor = -1


def _runtime_address() -> int | None:
    try:
        return ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    except ValueError:
        return None


_library = ctypes.PyDLL(None)
_RUNTIME = _runtime_address()
