"""The priority of threads: an event loop has a core before threads that copy gigabytes for a disk or a wire.

Niceness decides how much of a core a thread has, and the slice how soon after it wakes. Since Linux 6.12, a thread which wakes
preempts one with a longer slice, unless it has had more than its share. Otherwise it may wait until that slice is over, and for
the kernel's next tick (4 ms at 250 Hz). https://docs.kernel.org/scheduler/sched-eevdf.html
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

logger = logging.getLogger(__name__)

NICENESS = 10
"""Added to the thread's own. Of a core that both want, such a thread has a tenth and the loop has the rest."""

SLICE_NANOSECONDS = 100_000
"""The shortest slice that Linux grants. The default is 1.4 ms with two cores, and 2.8 ms from eight on."""

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
"""The number of the system call `sched_setattr`, which the C library has only since glibc 2.41; `sched_getattr` has the next."""
_RESET_ON_FORK = 0x01


class _Attributes(ctypes.Structure):
    """The kernel's `struct sched_attr`, in its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def compute_nice() -> int:
    """Returns the niceness of vLLM and the trainer. Event loops come before them: they must answer at once and need little.

    Where a loop's slice makes it wake in time, 5 is enough. Beside a process of ordinary priority that wants the same core, they
    then have a fourth of it, and with 10 a tenth.
    """
    return 5 if has_slices() else 10


def side_nice() -> int:
    """Returns the niceness of processes that come after event loops and before vLLM and the trainer."""
    return compute_nice() // 2


@cache
def has_slices() -> bool:
    """Whether this kernel keeps a slice for each thread, as Linux does since 6.12."""
    if sys.platform != "linux" or _SCHED_SETATTR is None:
        return False
    attributes = _Attributes()
    arguments = ctypes.byref(attributes), ctypes.sizeof(attributes), 0
    return not ctypes.CDLL(None).syscall(ctypes.c_long(_SCHED_SETATTR + 1), 0, *arguments) and attributes.runtime > 0


def lower_own_priority() -> None:
    """Lowers the priority of the calling thread, on Linux. Elsewhere niceness is a process's, so nothing is done.

    It will `wake_soon`, too.

    For good: only root may raise it again. Threads and processes that the thread starts inherit it. So it is for threads that
    start no process, and that run no code by import path.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        try:
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)  # at most 19
        except OSError as error:  # a filter of system calls, such as systemd's `~@resources`
            logger.info(
                "%s keeps its priority, so the event loop may lag more: %s", threading.current_thread().name, error
            )
        else:
            wake_soon()


def wake_soon() -> None:
    """Gives the calling thread a short slice for good, and with it the threads and processes that it starts from now on.

    For processes of low priority that are waited for. Their share of a core stays as small as their priority says, but they get
    it soon after they wake. On a machine that others keep busy, they would wait 30 ms each time.
    """
    set_own_slice(SLICE_NANOSECONDS, inherited=True)


@contextmanager
def short_slice() -> Iterator[None]:
    """Lets the calling thread preempt others as soon as it wakes, during the block. Linux before 6.12 ignores it.

    Its share of a core stays the same. Threads and processes that it starts have the default slice. They also have niceness 0
    if its own is negative: the kernel resets both or none.
    """
    set_own_slice(SLICE_NANOSECONDS)
    try:
        yield
    finally:
        set_own_slice(0)


def set_own_slice(nanoseconds: int, *, inherited: bool = False) -> None:
    """Sets the calling thread's slice; 0 for the kernel's default. Does nothing where it cannot be set, or not be kept.

    That is off Linux, on processors whose number of the system call is not known here, and for a thread of another policy than
    the ordinary one, such as a real-time thread. Threads and processes that it starts have the default slice, unless it is
    `inherited`.
    """
    if sys.platform != "linux" or _SCHED_SETATTR is None or os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK:
        return
    attributes = _Attributes(size=ctypes.sizeof(_Attributes), policy=os.SCHED_OTHER)
    attributes.flags = 0 if inherited else _RESET_ON_FORK
    attributes.nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    attributes.runtime = nanoseconds
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(ctypes.c_long(_SCHED_SETATTR), 0, ctypes.byref(attributes), 0):
        reason = os.strerror(ctypes.get_errno())  # such as that of a filter of system calls
        logger.info("%s keeps its slice, so the event loop may lag more: %s", threading.current_thread().name, reason)
