"""A quick benchmark as a test. Its bounds, ratios within one run, are three times as wide: only gross faults break them."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from perf.noise import TOO_NOISY, measured_noise

ATTEMPTS = 3
"""A machine may be busy with something else; a fault is there every time."""

NOISY_ATTEMPTS = 4
"""How many more there may be while other processes take so much of the machine that a benchmark itself decides nothing."""

QUIET_SECONDS = 45.0
"""Longest wait for others to be done before the next of these."""


def wait_for_quiet() -> None:
    """Waits until others have left the machine alone for a second, or for as long as they may take."""
    deadline, share = time.monotonic() + QUIET_SECONDS, 1.0
    while share > TOO_NOISY and time.monotonic() < deadline:
        with measured_noise() as noise:
            time.sleep(1.0)
        share = noise.share


def assert_not_grossly_worse(case: str) -> None:
    """Runs the case until its bounds hold. Fails once they were broken, or not decided, too often."""
    broken: list[str] = []
    undecided: list[str] = []
    while len(broken) < ATTEMPTS and len(undecided) < NOISY_ATTEMPTS:
        command = [sys.executable, "-m", "perf.bench", case, "--quick", "--json"]
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
        assert completed.stdout, completed.stderr
        figures = [figure for measured in json.loads(completed.stdout) for figure in measured["figures"]]
        assert any(figure["held"] is not None for figure in figures), "a guard that cannot fail"
        missed = [figure for figure in figures if figure["held"] is False]
        if not missed:
            return
        decided = any(figure["verdict"] == "broken" for figure in missed)
        (broken if decided else undecided).append(
            "; ".join(f"{figure['name']}: {figure['value']}" for figure in missed)
        )
        if not decided:
            wait_for_quiet()
    pytest.fail(f"broken: {broken}; undecided, since too much else runs on this machine: {undecided}")
