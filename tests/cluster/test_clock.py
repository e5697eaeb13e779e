"""Time that counts only while the supervisor runs."""

from __future__ import annotations

import pytest

from counterpoint.cluster.clock import LONGEST_GAP_SECONDS, RunningClock


def test_a_gap_counts_as_a_moment_only() -> None:
    now = 100.0
    clock = RunningClock(lambda: now)
    begun = clock.read()
    for _ in range(3):
        now += 1.0
        clock.read()
    assert clock.read() - begun == pytest.approx(3.0)
    now = 103.0 + 8 * 3600  # the machine was suspended, or the process stopped
    assert clock.read() - begun == pytest.approx(3.0 + LONGEST_GAP_SECONDS)
    now += 1.0
    assert clock.read() - begun == pytest.approx(4.0 + LONGEST_GAP_SECONDS)
