"""The server of an experiment: one that does not listen holds up no tuner."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from counterpoint.tune.errors import TuneError
from counterpoint.tune.runner import experiment_server
from counterpoint.tune.runner.experiment_server import ExperimentServer
from tests.support.children import start_instead


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("import time; time.sleep(600)", r"its process wrote no line within 0\.2 s"),
        ("import sys, time; print('half', end='', flush=True); time.sleep(600)", r"no line within 0\.2 s"),
        ("import sys; print('the port is taken', file=sys.stderr)", "the port is taken"),
    ],
)
def test_a_server_that_does_not_listen_is_an_error_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, why: str
) -> None:
    start_instead(monkeypatch, experiment_server, lambda _: [sys.executable, "-I", "-c", program])
    monkeypatch.setattr(experiment_server, "START_SECONDS", 60.0 if "stderr" in program else 0.2)
    with pytest.raises(TuneError, match=why):
        ExperimentServer(tmp_path, 0)
