"""The health check of a container: by its exit code, whether what runs there is alive and its event loop goes on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from counterpoint.cli.main import main
from counterpoint.job.directory import JOB_LOCK, lock_file_of
from counterpoint.job.reading.health import SILENT_SECONDS, STARTING_SECONDS, health_of
from counterpoint.orchestrator.run_directory import taken_over
from counterpoint.orchestrator.telemetry import catalogue
from counterpoint.orchestrator.telemetry.endpoint import RunTelemetry
from counterpoint.run.config import RunConfig
from counterpoint.run.loop_health.lag import EventLoopLagMonitor
from counterpoint.transport.files.lock import take_lock
from counterpoint.transport.telemetry.endpoint import MetricsEndpoint
from tests.support.polling import wait_until


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
    """For a while: missing is not starting. What is not known is not said."""
    with held(lock_file_of(tmp_path, "one")):
        code, said = check(tmp_path, capsys)
        assert (code, "begins run one" in said, "goes on" in said) == (0, True, False)
        long_ago = time.time() - STARTING_SECONDS - 1
        os.utime(lock_file_of(tmp_path, "one"), (long_ago, long_ago))
        code, said = check(tmp_path, capsys)
        assert (code, "control/endpoint.json" in said) == (1, True)


@pytest.mark.slow
def test_a_process_that_is_stopped_before_it_serves_metrics_is_unhealthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import sys, time; from pathlib import Path; from counterpoint.transport.files.lock import take_lock; "
    code += "lock = take_lock(Path(sys.argv[1]), 'taken'); print('taken', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", code, str(lock_file_of(tmp_path, "one"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert check(tmp_path, capsys)[0] == 0
            process.send_signal(signal.SIGSTOP)
            wait_until(lambda: check(tmp_path, capsys)[0] == 1, "the stop")
            assert "is stopped" in check(tmp_path, capsys)[1]
            with held(tmp_path / JOB_LOCK):
                (tmp_path / JOB_LOCK).write_text(f"{process.pid} {socket.gethostname()}\n")
                assert check(tmp_path, capsys)[0] == 1
        finally:
            process.kill()


@pytest.mark.parametrize(("silent", "code"), [(1.0, 0), (SILENT_SECONDS + 1, 1)])
def test_a_run_is_found_where_the_jobs_directory_is_anothers(
    tmp_path: Path, silent: float, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prometheus").write_text("in the way")
    environments = [{"name": "a", "kind": "reverse-text"}]
    values = {"run_id": "one", "output_dir": tmp_path, "model": "m", "environments": environments}
    config = RunConfig.model_validate(values)
    (config.run_dir / "control").mkdir(parents=True)
    with held(lock_file_of(tmp_path, "one")), RunTelemetry(config, EventLoopLagMonitor(config.lag)) as telemetry:
        telemetry._values.set(catalogue.SILENT, silent)
        found, said = check(tmp_path, capsys)
        assert (found, "event loop" in said) == (code, True)
    assert not (config.run_dir / "control" / "endpoint.json").exists()


@pytest.mark.parametrize(("silent", "code"), [(1.0, 0), (SILENT_SECONDS + 1, 1)])
def test_a_run_is_as_healthy_as_its_event_loop(
    tmp_path: Path, silent: float, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with held(lock_file_of(tmp_path, "one")), MetricsEndpoint(0, catalogue.ORCHESTRATOR, {"run": "one"}) as endpoint:
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


def test_a_run_that_begins_anew_is_not_looked_for_at_its_former_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {
        "run_id": "one",
        "output_dir": tmp_path,
        "model": "m",
        "environments": [{"name": "a", "kind": "reverse-text"}],
    }
    config = RunConfig.model_validate(values)
    places = (config.run_dir / "control" / "endpoint.json", tmp_path / "prometheus" / "orchestrator_one.json")
    for place in places:
        place.parent.mkdir(parents=True)
        place.write_text(json.dumps([{"targets": ["127.0.0.1:1"]}]))
    with taken_over(config):
        code, said = check(tmp_path, capsys)
        assert (code, "begins run one" in said) == (0, True)


def test_a_proxy_is_not_asked(tmp_path: Path) -> None:
    """In a process of its own, since the library reads the variables once."""
    command = [sys.executable, "-m", "counterpoint.cli.main", "status", str(tmp_path), "--health"]
    variables = {"http_proxy": "http://127.0.0.1:1", "no_proxy": "", "NO_PROXY": ""}
    with held(lock_file_of(tmp_path, "one")), MetricsEndpoint(0, catalogue.ORCHESTRATOR, {"run": "one"}) as endpoint:
        endpoint.write_target(tmp_path, "orchestrator_one")
        endpoint.values.set(catalogue.SILENT, 1.0)
        completed = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("closed", ["run_one/control", "run_one/orchestrator.lock", "job.lock"])
def test_what_another_user_lets_nobody_see_is_no_error(closed: str) -> None:
    with tempfile.TemporaryDirectory() as name:  # which, unlike pytest's, others may be let into
        directory = Path(name)
        directory.chmod(0o755)
        (directory / "run_one" / "control").mkdir(parents=True)
        with held(lock_file_of(directory, "one")), held(directory / JOB_LOCK):
            (directory / closed).chmod(0)
            os.seteuid(65534)
            try:
                found = health_of(directory)
            finally:
                os.seteuid(0)
        assert found.alive or found.faults


def test_runs_of_other_machines_are_not_this_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with held(lock_file_of(tmp_path, "other")):
        lock_file_of(tmp_path, "other").write_text("7 elsewhere\n")
        assert check(tmp_path, capsys)[0] == 1
        with held(lock_file_of(tmp_path, "one")):
            assert check(tmp_path, capsys)[0] == 0


def test_a_check_imports_little(tmp_path: Path) -> None:
    check = f"import sys; from counterpoint.cli.main import main; main(['status', {str(tmp_path)!r}, '--health'])"
    code = f"{check}; print(*sys.modules, file=sys.stderr)"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(completed.stderr.split()) & {"pydantic", "numpy", "rich", "asyncio", "aiohttp", "zmq", "torch"}
