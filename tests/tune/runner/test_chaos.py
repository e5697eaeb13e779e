"""A short chaos of real processes; `python -m perf.chaos tune` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf.chaos.tune.chaos import chaos


@pytest.mark.slow
def test_killed_runners_executors_and_trials_lose_nothing(tmp_path: Path) -> None:
    toll = chaos(1, seed=2, parent=tmp_path)
    assert {fault: cases for fault, cases in toll.found.items() if cases} == {}
    assert toll.experiments == 1
