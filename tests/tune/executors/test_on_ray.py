"""The executor on Ray: what every executor must do, and what Ray adds; in a process of its own (`ray_suite.py`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).with_name("ray_suite.py")

SECONDS = 400.0


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 20)
def test_the_executor_on_ray_does_what_it_must(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-x", "--durations=5", f"--basetemp={tmp_path / 'suite'}", str(SUITE)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=SECONDS)
    assert ran.returncode == 0, ran.stdout + ran.stderr
