"""A short chaos on a disk and on S3; `python -m perf.chaos sweep` is the long one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from perf.chaos.sweep_chaos import FAULTS, Settings, chaos


@pytest.mark.slow
@pytest.mark.parametrize("root", ["local", "s3"], indirect=True)
def test_killed_workers_lose_nothing_and_no_two_live_at_once(root: str, tmp_path: Path) -> None:
    settings = Settings(workers=3, targets=12, kills=5, heartbeat=0.4, lease=3.0)
    witness = tmp_path / "witness"
    witness.mkdir()
    counts = chaos(root, witness, settings, random.Random(1))
    assert {fault: counts[fault] for fault in FAULTS} == dict.fromkeys(FAULTS, 0)
    assert counts["succeeded"] == settings.targets
    assert counts["workers killed"] > 0
    assert counts["bodies begun"] >= settings.targets
