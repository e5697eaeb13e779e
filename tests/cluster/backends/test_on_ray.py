"""The backend for Ray: what every backend must do, and what Ray adds; in a process of its own (`ray_suite.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.suite_process import SUITE_SECONDS, run_suite


@pytest.mark.slow
@pytest.mark.timeout(SUITE_SECONDS + 60)
def test_the_backend_for_ray_does_what_it_must(tmp_path: Path) -> None:
    run_suite(Path(__file__).with_name("ray_suite.py"), tmp_path / "suite")
