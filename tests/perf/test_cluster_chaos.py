"""The controller's chaos in small: its plan, and two rounds that cost nothing. (Its audit: `test_cluster_chaos_audit.py`.)"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter

import pytest

from perf.chaos.cluster.chaos import every_fault, plan_of


@pytest.mark.parametrize("backend", ["local", "ray"])
@pytest.mark.parametrize("rounds", [20, 100])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_fault_comes_twice_whatever_the_chance(backend: str, rounds: int, seed: int) -> None:
    names = every_fault(backend)
    plan = plan_of(names, rounds, 2, random.Random(seed))
    counts = Counter(fault for faults in plan for fault in faults)
    assert len(plan) == rounds
    assert all(plan)
    assert min(counts[name] for name in names) >= 2


def test_a_plan_can_ask_for_each_fault_once() -> None:
    assert sorted(fault for faults in plan_of(["a", "b"], 2, 1, random.Random(1)) for fault in faults) == ["a", "b"]


@pytest.mark.slow
def test_a_job_whose_master_and_trainer_are_killed_loses_nothing() -> None:
    command = [sys.executable, "-m", "perf.chaos", "cluster", "--rounds", "2", "--json"]
    completed = subprocess.run(
        [*command, "--each", "1", "--fault", "kill master", "--fault", "kill trainer"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    (case,) = json.loads(completed.stdout)
    figures = {figure["name"]: figure["value"] for figure in case["figures"]}
    assert figures["kill master"] == figures["kill trainer"] == 1
    assert figures["records committed"] > 0
