"""The controller's chaos in small: two rounds that cost nothing. (Its audit is tested in `test_cluster_chaos_audit.py`.)"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_whose_master_and_trainer_are_killed_loses_nothing() -> None:
    command = [sys.executable, "-m", "cli.main", "bench", "cluster-chaos", "--rounds", "2", "--json"]
    completed = subprocess.run(
        [*command, "--fault", "kill master", "--fault", "kill trainer-0"], capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr
    (case,) = json.loads(completed.stdout)
    figures = {figure["name"]: figure["value"] for figure in case["figures"]}
    assert figures["kill master"] == figures["kill trainer-0"] == 1
    assert figures["records committed"] > 0
