"""The health check of a container: by its exit code, whether what runs there is alive and its event loop goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli.main import main
from job.directory import JOB_LOCK, lock_file_of
from job.inspection.health import SILENT_SECONDS
from orchestrator.telemetry import catalogue
from transport.files.lock import take_lock
from transport.telemetry.endpoint import Endpoint


@contextmanager
def held(path: Path) -> Iterator[None]:
    lock = take_lock(path, "taken")
    try:
        yield
    finally:
        os.close(lock)


def check(directory: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["status", str(directory), "--health"])
    return code, capsys.readouterr().out


def test_a_directory_where_nothing_lives_is_unhealthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with held(lock_file_of(tmp_path, "one")):
        pass
    code, said = check(tmp_path, capsys)
    assert (code, str(tmp_path) in said) == (1, True)


def test_a_run_that_begins_serves_no_metrics_and_is_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with held(lock_file_of(tmp_path, "one")):
        assert check(tmp_path, capsys)[0] == 0


@pytest.mark.parametrize(("silent", "code"), [(1.0, 0), (SILENT_SECONDS + 1, 1)])
def test_a_run_is_as_healthy_as_its_event_loop(
    tmp_path: Path, silent: float, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with held(lock_file_of(tmp_path, "one")), Endpoint(0, catalogue.ORCHESTRATOR, {"run": "one"}) as endpoint:
        endpoint.write_target(tmp_path, "orchestrator_one")
        endpoint.values.set(catalogue.SILENT, silent)
        found, said = check(tmp_path, capsys)
        assert (found, "event loop" in said) == (code, True)


def test_a_process_that_does_not_answer_is_unhealthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prometheus").mkdir()
    (tmp_path / "prometheus" / "orchestrator_one.json").write_text(json.dumps([{"targets": ["127.0.0.1:1"]}]))
    with held(lock_file_of(tmp_path, "one")):
        code, said = check(tmp_path, capsys)
        assert (code, "does not answer" in said) == (1, True)
        with held(tmp_path / JOB_LOCK):  # a job's supervisor sees to its roles
            assert check(tmp_path, capsys)[0] == 0


def test_runs_of_other_machines_are_not_this_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with held(lock_file_of(tmp_path, "other")):
        lock_file_of(tmp_path, "other").write_text("7 elsewhere\n")
        assert check(tmp_path, capsys)[0] == 1
        with held(lock_file_of(tmp_path, "one")):
            assert check(tmp_path, capsys)[0] == 0


def test_a_check_imports_little(tmp_path: Path) -> None:
    code = f"import sys, cli.main; cli.main.main(['status', {str(tmp_path)!r}, '--health']); print(*sys.modules, file=sys.stderr)"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(completed.stderr.split()) & {"pydantic", "numpy", "rich", "asyncio", "aiohttp", "zmq", "torch"}
