"""`environments.workers.found`: what a process that loads an environment leaves behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.workers.found import check_in_process

pytestmark = pytest.mark.slow

MODULE = """
import pathlib, subprocess, time
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
file = pathlib.Path(__file__).with_name("pid")
file.with_name("new").write_text(str(child.pid))
file.with_name("new").rename(file)
print("started", flush=True)
time.sleep(600)
"""


def test_an_environment_that_is_not_loaded_in_time_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "waits_while_imported.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    file = tmp_path / "pid"

    monkeypatch.setattr(time, "monotonic", lambda: 1e6 * file.exists())  # the time is over once it has started its own
    with pytest.raises(ValueError, match="was not loaded within"):
        check_in_process(EnvironmentConfig(name="waiting", kind="waits_while_imported:Environment"))
    for _ in range(600):  # a killed process is there until the machine's first process has seen its end
        try:
            os.kill(int(file.read_text()), 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("what the environment started is still there")


@pytest.mark.slow
def test_the_bounds_of_rewards_are_known_outside_of_the_workers() -> None:
    assert check_in_process(EnvironmentConfig(name="guesses", kind="guess-number")).reward_bounds == (0.0, 1.0)
    assert (
        check_in_process(EnvironmentConfig(name="toy", kind="tests.orchestrator.toy_environment:Toy")).reward_bounds
        is None
    )
