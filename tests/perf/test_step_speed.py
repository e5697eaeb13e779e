"""The comparison of a training step with TRL's: both train the same batches to the same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perf.step_speed import Measured, Settings, report

SMALL = Settings("small", "cpu", groups=2, prompt=12, completion=20, steps=2, row_tokens=256)

PRINT = "import json, perf.step_speed as s; print(json.dumps([each.losses for each in s.measure(s.Settings(**{}))]))"


def losses_of(settings: Settings) -> tuple[list[float], list[float]]:
    """Those of ours and of TRL's, from a process of its own: TRL takes seconds to import and warns while it does."""
    given = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
    done = subprocess.run(
        [sys.executable, "-c", PRINT.format(given)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ours, trl = json.loads(done.stdout.splitlines()[-1])
    return ours, trl


@pytest.mark.slow
def test_both_sides_compute_the_same_losses() -> None:
    """There are three steps, so the updates are equal, too, as far as they change the next loss."""
    ours, trl = losses_of(SMALL)
    assert ours == pytest.approx(trl, abs=1e-5)
    assert len(set(ours)) == len(ours) == SMALL.steps + 1


def test_the_report_has_the_ratio() -> None:
    lines = report(SMALL, Measured(0.5, 0, [0.25]), Measured(1.0, 2 * 10**9, [0.25])).splitlines()
    assert lines[-1] == "ours over TRL: 2.00 times the tokens a second"
    assert "peak 2.00 GB" in lines[2]
    assert "peak" not in lines[1]
