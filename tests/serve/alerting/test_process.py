"""Alerts to a real HTTP server: one that fails, hangs, redirects, or has a certificate that nobody vouches for."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from counterpoint.cluster.worker_view import State, WorkerView
from counterpoint.job.directory import JOB_LOCK
from counterpoint.job.processes_file import ProcessesFile
from counterpoint.job.tracking.alerts import AlertsConfig, address_of
from counterpoint.job.tracking.sink_process import SinkSpec
from counterpoint.serve.alerting import notices, process
from counterpoint.serve.alerting.process import ATTEMPTS, Sender, page_of, run
from counterpoint.serve.alerting.webhook import Answer, Webhook
from counterpoint.transport.files.lock import take_lock
from tests.serve.alerting.receiver import Receiver, receiving
from tests.serve.test_process import make_certificate
from tests.support.polling import wait_until

BODY = {"text": "[error] demo: it burns"}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


def make_job(directory: Path) -> Path:
    """A job whose one run is evicted. Returns the file that says so."""
    run_dir = directory / "run_a"
    (run_dir / "control").mkdir(parents=True)
    (directory / "job.json").write_text(json.dumps({"runs": [{"run_id": "a", "steps": 3}], "orchestrator": {}}))
    (run_dir / "control" / "orch.toml").write_text('run_id = "a"\n')
    evicted = run_dir / "control" / "evicted.txt"
    evicted.write_text("by an operator")
    return evicted


def spec_of(directory: Path, url: str, **options: Any) -> SinkSpec:
    given = AlertsConfig(url=url, **options).model_dump(mode="json")
    return SinkSpec("alerts", "", str(directory), "demo", given, poll_seconds=0.01)


def test_a_problem_its_end_and_the_job_s_end_are_told(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    evicted = make_job(tmp_path / "demo")
    monkeypatch.setattr(notices, "GONE_SECONDS", 0.0)

    def over(seconds: float) -> bool:
        time.sleep(seconds)
        if receiver.got:
            evicted.unlink(missing_ok=True)
        return len(receiver.got) == 2

    run(spec_of(tmp_path / "demo", receiver.url, page="https://page.example.org"), over, lambda sent: None)
    begun, ended, end = receiver.got
    assert (begun["event"], begun["kind"], begun["severity"], begun["job"], begun["run"]) == (
        "problem", "evicted", "error", "demo", "a",
    )  # fmt: skip
    assert begun["message"] == "evicted: by an operator"
    assert begun["link"] == "https://page.example.org/#/jobs/demo/runs/a"
    assert begun["since"] == pytest.approx(time.time(), abs=100)
    assert (ended["event"], ended["since"]) == ("problem-ended", begun["since"])
    assert end["event"] == "job-failed", "nobody runs it"
    assert receiver.url not in str(receiver.got)


@pytest.mark.parametrize(
    ("section", "page"),
    [
        ({}, "http://127.0.0.1:8400/"),
        ({"port": 0}, ""),
        ({"host": "0.0.0.0"}, ""),
        ({"host": "::", "names": ["lab.example.org", "other"]}, "https://lab.example.org:8400/"),
        ({"host": "2001:db8::1"}, "https://[2001:db8::1]:8400/"),
    ],
)
def test_a_link_leads_to_the_page_of_the_job_or_is_left_out(tmp_path: Path, section: dict[str, Any], page: str) -> None:
    keys = {} if section.get("host") is None else {"tls_certificate": "c.pem", "tls_key": "k.pem"}
    (tmp_path / "job.json").write_text(json.dumps({"serve": section | keys}))
    assert page_of(tmp_path) == page


def test_a_restart_tells_nothing_twice(tmp_path: Path, receiver: Receiver) -> None:
    make_job(tmp_path / "demo")

    class Killed(Exception):
        pass

    def kill(seconds: float) -> bool:
        raise Killed

    for _ in range(2):
        with pytest.raises(Killed):
            run(spec_of(tmp_path / "demo", receiver.url), kill, lambda sent: None)
    assert [each["event"] for each in receiver.got] == ["problem"]


def test_one_that_fails_is_asked_again_and_one_that_refuses_is_not(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    hook = Webhook(receiver.url, {"Authorization": "Bearer abc"})
    receiver.answers = [500, 503, 200]
    sender = Sender(hook, 600)
    assert [sender.send(BODY) for _ in range(3)] == [False, False, True]
    assert (receiver.got, receiver.headers[0]["Authorization"]) == ([BODY], "Bearer abc")
    assert 1.0 < sender.pause() <= 2.0
    receiver.answers = [404]
    assert sender.send(BODY) is True
    receiver.answers = [500] * ATTEMPTS
    assert [sender.send(BODY) for _ in range(ATTEMPTS)] == [False] * (ATTEMPTS - 1) + [True]
    assert (sender.given_up, len(receiver.got)) == (2, 1)
    assert 50.0 < sender.pause() <= 60.0
    assert "given up: [error] demo: it burns" in caplog.text
    assert "a-secret-path" not in caplog.text
    assert "Bearer" not in caplog.text


class Dead:
    """A webhook that nothing reaches."""

    def post(self, body: Any) -> Answer:
        return Answer(False, "no connection")


def test_one_that_is_away_for_days_and_then_the_job_s_end() -> None:
    sender = Sender(cast(Webhook, Dead()), 600)
    for _ in range(1100):
        sender.send(BODY)
    assert 50.0 < sender.pause() <= 60.0
    sender.send(BODY)
    sender.begin_again()
    assert [sender.send(BODY, 3) for _ in range(3)] == [False, False, True]


def write_trainer(directory: Path, state: State) -> None:
    """Writes what the job's supervisor knows of its trainer."""
    trainer = WorkerView("trainer", state, time.time(), os.getpid(), "", log_from=0, node="node-0")
    ProcessesFile(directory).write(State.RUNNING, [trainer])


def test_who_stops_following_a_job_that_goes_on_tells_no_end(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "END_SECONDS", 0.0)
    make_job(tmp_path / "demo")
    spec = spec_of(tmp_path / "demo", receiver.url)
    write_trainer(tmp_path / "demo", State.READY)
    lock = take_lock(tmp_path / "demo" / JOB_LOCK, "taken")
    try:
        run(spec, lambda seconds: True, lambda sent: None)
        run(spec, lambda seconds: True, lambda sent: None)
        assert [each["event"] for each in receiver.got] == ["problem"], "and the next tells nothing twice"
        write_trainer(tmp_path / "demo", State.STOPPED)
        run(spec, lambda seconds: True, lambda sent: None)
    finally:
        os.close(lock)
    assert [each["event"] for each in receiver.got] == ["problem", "job-failed"]


def test_a_name_that_is_looked_up_for_long_costs_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    found = threading.Event()

    def lookup(*_: Any, **__: Any) -> Any:
        found.wait(20)
        raise socket.gaierror(socket.EAI_AGAIN, "not now")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    began = time.monotonic()
    try:
        answer = Webhook("https://hooks.example.org/x", deadline_seconds=0.05).post(BODY)
        assert time.monotonic() - began < 10
    finally:
        found.set()
    assert "0.05 s" in answer.reason


def test_a_burst_waits_for_its_turn(receiver: Receiver) -> None:
    sender = Sender(Webhook(receiver.url), per_minute=2)
    for _ in range(2):
        assert sender.pause() == 0
        sender.send(BODY)
    assert 20.0 < sender.pause() <= 30.0


@pytest.mark.slow
def test_one_that_hangs_costs_its_deadline(receiver: Receiver) -> None:
    receiver.hang.clear()
    answer = Webhook(receiver.url, deadline_seconds=0.3).post(BODY)
    assert (answer.taken, answer.final) == (False, False)
    assert "0.3 s" in answer.reason


def test_a_redirect_is_not_followed(receiver: Receiver) -> None:
    with receiving() as other:
        for status in (301, 307, 308):
            receiver.answers, receiver.location = [status], other.url
            answer = Webhook(receiver.url).post(BODY)
            assert (answer.taken, answer.final) == (False, True)
        assert other.requests == 0


@pytest.mark.slow
def test_a_certificate_that_nobody_vouches_for_gets_nothing(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with receiving(context) as receiver:
        refused = Webhook(receiver.url).post(BODY)
        assert (refused.taken, receiver.requests) == (False, 0)
        assert Webhook(receiver.url, context=ssl.create_default_context(cafile=certificate)).post(BODY) == Answer(True)


def test_no_server_at_all_is_an_answer_without_the_address() -> None:
    answer = Webhook("http://127.0.0.1:1/a-secret-path").post(BODY)
    assert (answer.taken, answer.final) == (False, False)
    assert "secret" not in answer.reason


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "expected one of them"),
        ({"url": "https://a.example", "url_file": "x"}, "expected one of them"),
        ({"url": "http://hooks.example.org/x"}, "expected https"),
        ({"url": "https://me:hush@hooks.example.org/x"}, "headers_file"),
        ({"url": "ftp://hooks.example.org"}, "no address"),
        ({"url": "https://a.example", "severities": []}, "at least 1"),
        ({"url": "https://a.example", "page": "counterpoint"}, "expected an address"),
    ],
)
def test_an_address_that_is_not_safe_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        AlertsConfig.model_validate(given)


def test_the_file_of_the_address_is_its_owner_s_and_is_not_quoted(tmp_path: Path) -> None:
    file = tmp_path / "hook"
    file.write_text("https://hooks.example.org/services/T0/B0/secret\n")
    file.chmod(0o644)
    with pytest.raises(ValueError, match="can be read by others"):
        address_of(None, file)
    file.chmod(0o600)
    assert address_of(None, file) == "https://hooks.example.org/services/T0/B0/secret"
    file.write_text("http://hooks.example.org/services/T0/B0/secret")
    with pytest.raises(ValueError, match="expected https") as refused:
        address_of(None, file)
    assert "services" not in str(refused.value)


@pytest.mark.slow
def test_the_worker_of_a_job_sends_them(tmp_path: Path, receiver: Receiver) -> None:
    directory = tmp_path / "demo"
    make_job(directory)
    file = tmp_path / "hook"
    file.write_text(receiver.url)
    file.chmod(0o600)
    job = json.loads((directory / "job.json").read_text())
    (directory / "job.json").write_text(json.dumps(job | {"alerts": {"url_file": str(file)}, "serve": {"port": 8500}}))
    command = [sys.executable, "-m", "counterpoint.cli.main", "track", str(directory), "--follow"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as worker:
        wait_until(lambda: bool(receiver.got), "the first alert")
        worker.send_signal(signal.SIGTERM)
        said = worker.communicate(timeout=100)[1]
    assert worker.returncode == 0
    assert [each["event"] for each in receiver.got] == ["problem", "job-failed"]
    assert receiver.got[0]["link"] == "http://127.0.0.1:8500/#/jobs/demo/runs/a"
    assert "a-secret-path" not in said
    assert json.loads((directory / "tracking" / "alerts.json").read_text())["told"] == {}
