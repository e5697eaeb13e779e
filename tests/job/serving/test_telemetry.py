"""What a supervisor shows of its workers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from counterpoint.cluster.worker_view import State, WorkerView
from counterpoint.job.serving import telemetry as catalogue
from counterpoint.job.serving.telemetry import JobTelemetry
from counterpoint.transport.errors import Obstructed
from tests.support.ports import taken_port
from tests.transport.telemetry.scraping import families


def view(name: str, state: State, restarts: int = 0) -> WorkerView:
    return WorkerView(name, state, 1000.0, None, "", restarts=restarts)


def test_workers_are_as_they_were_shown_last(tmp_path: Path) -> None:
    with JobTelemetry("127.0.0.1", 0, tmp_path) as telemetry:
        before = families(telemetry.port)
        workers = [
            view("trainer", State.READY, 2),
            view("orchestrator", State.FAILED),
            view("inference_0", State.READY),
        ]
        heard = {"trainer": time.monotonic() - 7, "orchestrator": time.monotonic() - 9}
        telemetry.show(State.RUNNING, workers, heard, 1)
        shown = families(telemetry.port)
        values = telemetry._endpoint.values.read()
        assert (tmp_path / "prometheus" / "supervisor.json").exists()
    assert "counterpoint_job_state" not in before
    assert {metric.name for metric in catalogue.SUPERVISOR.metrics} <= shown.keys()
    assert {key for key, value in values[catalogue.JOB_STATE].items() if value} == {("running",)}
    assert values[catalogue.WORKERS]["ready",] == 2
    assert values[catalogue.WORKERS]["failed",] == 1
    assert values[catalogue.RESTARTS]["trainer",] == 2
    assert values[catalogue.HEARTBEAT_AGE].keys() == {("trainer",)}
    assert float(str(values[catalogue.HEARTBEAT_AGE]["trainer",])) >= 7


def test_a_port_in_use_is_an_obstacle(tmp_path: Path) -> None:
    with taken_port() as port, pytest.raises(Obstructed, match="or 0 for any free one"):
        JobTelemetry("127.0.0.1", port, tmp_path).__enter__()
