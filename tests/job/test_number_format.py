"""How numbers are printed."""

from __future__ import annotations

from counterpoint.job.number_format import duration


def test_durations_read_well() -> None:
    assert [duration(seconds) for seconds in (0.4, 59, 60, 245.2)] == ["0 s", "59 s", "1 min 00 s", "4 min 05 s"]
