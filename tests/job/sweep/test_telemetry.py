"""What a worker of a sweep shows: its claims, and all targets as they are stored."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from pathlib import Path

import pytest

from counterpoint.job.sweep import telemetry as catalogue
from counterpoint.job.sweep.targets import SweepConfig, Target
from counterpoint.job.sweep.telemetry import WorkerTelemetry
from counterpoint.sweep.claim import SweepTarget, claim_and_run
from tests.transport.telemetry.scraping import families


def telemetry_of(tmp_path: Path, names: list[str], **fields: object) -> WorkerTelemetry:
    config = SweepConfig.model_validate({"name": "grid", "root": str(tmp_path / "store")} | fields)
    targets = [Target(name, {}, {}, tmp_path / "out" / name, None, None, "f") for name in names]
    return WorkerTelemetry(config, targets)


def test_claims_and_the_states_of_all_targets_are_shown(tmp_path: Path) -> None:
    telemetry = telemetry_of(tmp_path, ["a", "b", "c"])

    def body(target: SweepTarget[str]) -> None:
        with telemetry.claimed():
            if target.target_id == "b":
                raise ValueError("no")

    with contextlib.suppress(ExceptionGroup):
        claim_and_run(
            str(tmp_path / "store" / "grid"), [SweepTarget(name, name) for name in ("a", "b")], body, keep_going=True
        )
    with telemetry:
        shown = families(telemetry.port)
        values = telemetry._endpoint.values.read()
    assert {metric.name for metric in catalogue.SWEEP.metrics} <= shown.keys()
    assert values[catalogue.TARGETS]["SUCCESS",] == 1
    assert values[catalogue.TARGETS]["FAILED",] == 1
    assert values[catalogue.TARGETS]["PENDING",] == 1
    assert values[catalogue.CLAIMS] == {(): 2}
    assert values[catalogue.ENDED] == {("success",): 1, ("failed",): 1}
    assert values[catalogue.STORE_UP] == {(): 1}


def test_a_claim_that_is_cancelled_was_interrupted(tmp_path: Path) -> None:
    telemetry = telemetry_of(tmp_path, ["a"])
    with pytest.raises(asyncio.CancelledError), telemetry.claimed():
        raise asyncio.CancelledError
    assert telemetry._endpoint.values.read()[catalogue.ENDED] == {("interrupted",): 1}


def test_a_storage_that_cannot_be_read_is_said_to_be_down(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    values = telemetry_of(tmp_path, ["a"])._endpoint.values.read()
    assert values[catalogue.STORE_UP] == {(): 0}
    assert catalogue.TARGETS not in values


def test_files_of_killed_workers_are_removed(tmp_path: Path) -> None:
    directory = tmp_path / "out" / "prometheus"
    directory.mkdir(parents=True)
    prefix = f"sweep_grid_{socket.gethostname()}_"
    (directory / f"{prefix}4194999.json").write_text("[]")  # above the largest pid of Linux
    (directory / f"{prefix}{os.getppid()}.json").write_text("[]")
    (directory / "sweep_grid_elsewhere_4194999.json").write_text("[]")
    with telemetry_of(tmp_path, ["a"]) as telemetry:
        own = json.loads((directory / f"{prefix}{os.getpid()}.json").read_text())
        assert own[0]["targets"] == [f"127.0.0.1:{telemetry.port}"]
        left = {path.name for path in directory.iterdir()}
    assert left == {f"{prefix}{os.getpid()}.json", f"{prefix}{os.getppid()}.json", "sweep_grid_elsewhere_4194999.json"}


def test_submitted_workers_have_no_port_in_common(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"prometheus_port = 9000 .*workers = 2"):
        telemetry_of(tmp_path, ["a"], prometheus_port=9000, workers=2)
