"""A stall of the machine is a time in which no CPU ran anything, not one in which a process or a CPU was busy."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.transport.process.launch import descendants
from perf.stalls import Stalls, at_once, recorded_stalls
from tests.support.polling import wait_until

MOMENTS = st.lists(st.integers(0, 40), unique=True, max_size=12).map(sorted)


def intervals(moments: list[int]) -> list[tuple[float, float]]:
    """Makes intervals, in the order of time, of an even number of moments."""
    return [(float(begin), float(end)) for begin, end in zip(moments[::2], moments[1::2], strict=False)]


@given(st.lists(MOMENTS.map(intervals), min_size=1, max_size=4))
def test_the_machine_stands_still_while_every_cpu_does(by_cpu: list[list[tuple[float, float]]]) -> None:
    common = at_once(by_cpu)
    assert common == sorted(common)
    for moment in range(40):  # between moment and moment + 1, everything is the same
        late = all(any(begin <= moment < end for begin, end in each) for each in by_cpu)
        assert any(begin <= moment < end for begin, end in common) is late


def test_a_stall_counts_for_the_part_that_is_within() -> None:
    stalls = Stalls(recorded=True, intervals=[(1.0, 2.0), (3.0, 3.5)])
    assert stalls.seconds == 1.5
    assert stalls.within(0.0, 1.0) == stalls.within(2.0, 3.0) == 0.0
    assert stalls.within(1.5, 3.25) == 0.75
    assert stalls.within(0.0, 9.0) == 1.5


def watchers() -> list[int]:
    """Returns the processes that watch a CPU each."""
    return [pid for pid in descendants(os.getpid()) if b"stalls.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def stop_for(pids: list[int], seconds: float) -> tuple[float, float]:
    """Stops processes; returns when all were stopped, and when the first was continued."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    stopped = time.perf_counter()
    time.sleep(seconds)
    continued = time.perf_counter()
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    return stopped, continued


@pytest.mark.slow
def test_what_holds_up_all_cpus_is_a_stall_and_what_holds_up_one_is_not() -> None:
    with recorded_stalls() as stalls:
        if not stalls.recorded:
            pytest.skip("this process has no right to real-time priority")
        time.sleep(0.02)
        pids = watchers()
        assert len(pids) == len(os.sched_getaffinity(0))
        one = stop_for(pids[:1], 0.1) if len(pids) > 1 else None
        time.sleep(0.02)
        whole = stop_for(pids, 0.1)
        time.sleep(0.02)
    assert stalls.within(*whole) >= 0.95 * (whole[1] - whole[0])
    if one is not None:
        assert stalls.within(*one) < 0.5 * (one[1] - one[0])  # the machine itself may have stood still meanwhile
    wait_until(lambda: watchers() == [], "the end of the watchers")
