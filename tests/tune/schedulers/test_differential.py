"""Our schedulers decide as Ray Tune's do. Ray draws from the global generators, so both sides play in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tune.schedulers.differential.scenario import SCHEDULERS

REPOSITORY = Path(__file__).parents[3]


def module(name: str, *arguments: str) -> str:
    """What a module of the differential test prints; fails with it if the sides differ."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.tune.schedulers.{name}", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_same_streams_give_the_same_decisions() -> None:
    """The whole proof is `python -m tests.tune.schedulers.differential --streams 10000`."""
    printed = module("differential", "--streams", "400")
    for scheduler in SCHEDULERS:
        assert f"{scheduler}: the same decisions" in printed


@pytest.mark.slow
def test_both_replays_read_both_policy_files_alike(tmp_path: Path) -> None:
    assert "policies are read alike" in module("differential.policies", str(tmp_path))
