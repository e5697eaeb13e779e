"""A short chaos of real processes; `python -m perf.chaos tune` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf.chaos.tune.chaos import chaos


@pytest.mark.slow
def test_killed_runners_executors_and_trials_lose_nothing(tmp_path: Path) -> None:
    findings = chaos(1, seed=2, parent=tmp_path).findings
    assert findings.held, findings.faults
    assert findings.counts["experiments"] == 1
