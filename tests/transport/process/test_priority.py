"""The priority of threads that copy, which they pass on, and the short slice of a loop's thread, which it does not pass on."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from counterpoint.transport.process import priority
from counterpoint.transport.process.priority import (
    NICENESS,
    SLICE_NANOSECONDS,
    compute_nice,
    has_slices,
    lower_own_priority,
    set_own_slice,
    short_slice,
    side_nice,
)
from tests.support.niceness import own_niceness
from tests.support.polling import DEADLINE_SECONDS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is a process's")


def run_in_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()


def test_only_the_thread_and_those_that_it_starts_have_the_lower_priority() -> None:
    before = own_niceness()
    found: list[int] = []

    def copy() -> None:
        lower_own_priority()
        found.append(own_niceness())
        run_in_thread(lambda: found.append(own_niceness()))

    run_in_thread(copy)
    assert found == [min(19, before + NICENESS)] * 2
    assert own_niceness() == before


def test_the_lowest_priority_stays() -> None:
    found: list[int] = []

    def copy() -> None:
        for _ in range(19 // NICENESS + 2):
            lower_own_priority()
        found.append(own_niceness())

    run_in_thread(copy)
    assert found == [19]


def test_a_forbidden_call_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    with caplog.at_level(logging.INFO):
        lower_own_priority()
    assert "keeps its priority" in caplog.text


SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}.get(platform.machine())
READ_SLICE = """
import ctypes, sys
attributes = (ctypes.c_uint64 * 6)()  # the fourth field of 8 bytes is the slice in nanoseconds
assert ctypes.CDLL(None).syscall(ctypes.c_long(int(sys.argv[1])), 0, attributes, 48, 0) == 0
print(attributes[3])
"""


def own_slice() -> int:
    attributes = (ctypes.c_uint64 * 6)()  # the fourth field of 8 bytes is the slice in nanoseconds
    assert SCHED_GETATTR is not None
    assert ctypes.CDLL(None).syscall(ctypes.c_long(SCHED_GETATTR), 0, attributes, 48, 0) == 0
    return attributes[3]


def slice_of_a_process() -> int:
    command = [sys.executable, "-I", "-S", "-c", READ_SLICE, str(SCHED_GETATTR)]
    return int(subprocess.run(command, capture_output=True, check=True, timeout=DEADLINE_SECONDS).stdout)


@pytest.mark.skipif(SCHED_GETATTR is None, reason="the number of the system call is not known here")
def test_a_kernel_with_slices_is_known_by_that_of_a_thread() -> None:
    assert has_slices() == (own_slice() > 0)


def test_what_computes_comes_last_and_at_least_as_late_where_loops_may_wake_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for slices in (True, False):
        monkeypatch.setattr(priority, "has_slices", lambda slices=slices: slices)
        found.append(compute_nice())
        assert 0 < side_nice() < compute_nice()
    assert found[0] < found[1] == 10


@pytest.mark.skipif(SCHED_GETATTR is None, reason="the number of the system call is not known here")
def test_only_the_thread_itself_has_the_short_slice_and_only_during_the_block() -> None:
    set_own_slice(0)  # a trainer may have run in this process
    default = own_slice()
    if default == 0:
        pytest.skip("this kernel has no slices by thread")
    found: list[int] = []
    with short_slice():
        assert own_slice() == SLICE_NANOSECONDS < default
        run_in_thread(lambda: found.append(own_slice()))
        found.append(slice_of_a_process())
    assert found == [default] * 2
    assert own_slice() == default


@pytest.mark.skipif(SCHED_GETATTR is None, reason="the number of the system call is not known here")
def test_a_thread_of_lower_priority_has_a_short_slice_as_those_that_it_starts() -> None:
    """ZMQ starts the thread by which a message reaches the thread that waits for it."""
    set_own_slice(0)  # a trainer may have run in this process
    default = own_slice()
    if default == 0:
        pytest.skip("this kernel has no slices by thread")
    found: list[int] = []

    def copy() -> None:
        lower_own_priority()
        found.append(own_slice())
        run_in_thread(lambda: found.append(own_slice()))

    run_in_thread(copy)
    assert found == [SLICE_NANOSECONDS] * 2
    assert own_slice() == default


def test_the_niceness_stays_beside_the_short_slice() -> None:
    found: list[int] = []

    def copy() -> None:
        lower_own_priority()
        with short_slice():
            found.append(own_niceness())
        found.append(own_niceness())

    before = own_niceness()
    run_in_thread(copy)
    assert found == [min(19, before + NICENESS)] * 2


def test_a_thread_of_another_policy_keeps_it() -> None:
    found: list[int] = []

    def work() -> None:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        with short_slice():
            found.append(os.sched_getscheduler(0))

    run_in_thread(work)
    assert found == [os.SCHED_BATCH]


def test_a_slice_that_cannot_be_set_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(priority, "_SCHED_SETATTR", 999_999)
    with caplog.at_level(logging.INFO), short_slice():
        pass
    assert "keeps its slice, so the event loop may lag more: Function not implemented" in caplog.text
