"""Tests that need a process of their own, as Ray's do: run there by pytest, with a deadline for each of them.

A total in seconds would fail on a slow machine, and say nothing about the test that hangs on a fast one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TEST_SECONDS = 600
"""For one test with its fixtures: two waits of `polling.DEADLINE_SECONDS`, so that such a wait fails by name first."""

SUITE_SECONDS = 2400
"""For all that no test's deadline covers, as an import that hangs. The caller has `pytest.mark.timeout(SUITE_SECONDS + 60)`."""


def run_suite(file: Path, directory: Path) -> None:
    """Runs the tests in `file`, with their temporary files in `directory`.

    Raises `AssertionError` with all they printed where one fails or takes more than `TEST_SECONDS`: pytest-timeout then prints
    where each of its threads stands.
    """
    options = ["-x", "-v", "--durations=5", f"--timeout={TEST_SECONDS}", f"--basetemp={directory}"]
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", *options, str(file)],
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SUITE_SECONDS,
        )
    except subprocess.TimeoutExpired as expired:
        printed = (expired.stdout or b"").decode(errors="replace")
        raise AssertionError(f"{file.name} did not end within {SUITE_SECONDS} s; it printed:\n{printed}") from None
    assert ran.returncode == 0, ran.stdout
