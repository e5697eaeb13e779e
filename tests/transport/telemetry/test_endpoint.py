"""The endpoint: on loopback only, in both formats, found by its file, and gone without a trace."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from counterpoint.transport.telemetry.endpoint import MetricsEndpoint
from counterpoint.transport.telemetry.metric import Metric, Process
from tests.support.polling import wait_until
from tests.support.ports import taken_port

COUNT = Metric("counterpoint_things", "counter", 'things\nof "two" lines', labels=("kind",))
TIME = Metric("counterpoint_time_seconds", "histogram", "time", "seconds", buckets=(0.1, 1.0))
TOY = Process("toy", "Toy", "A toy.", {"run": "the run's id"}, (COUNT, TIME))
OPENMETRICS = "application/openmetrics-text;version=1.0.0"


def endpoint(port: int = 0) -> MetricsEndpoint:
    return MetricsEndpoint(port, TOY, {"run": "a"})


def get(port: int, path: str = "/metrics", **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()
    finally:
        connection.close()


def test_both_formats_say_the_same() -> None:
    with endpoint() as served:
        served.values.add(COUNT, 2, 'a "b"\n\\')
        served.values.histogram(TIME).observe(0.5)
        status, kind, text = get(served.port, Accept=OPENMETRICS)
        plain = get(served.port)[2]
    assert status == 200
    assert kind.startswith("application/openmetrics-text")
    families = {family.name: family for family in text_string_to_metric_families(text)}  # type: ignore[no-untyped-call]
    (sample,) = families["counterpoint_things"].samples
    assert (sample.name, sample.labels, sample.value) == (
        "counterpoint_things_total",
        {"run": "a", "kind": 'a "b"\n\\'},
        2,
    )
    buckets = [(each.labels.get("le"), each.value) for each in families["counterpoint_time_seconds"].samples]
    assert buckets == [("0.1", 0), ("1.0", 1), ("+Inf", 1), (None, 0.5), (None, 1)]
    assert families["counterpoint_time_seconds"].unit == "seconds"
    assert 'counterpoint_time_seconds_bucket{le="1.0",run="a"} 1.0' in plain


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [
        ("/metrics", "localhost:1", 200),
        ("/metrics?x=1", "[::1]:1", 200),
        ("/metrics", "10.1.2.3", 200),
        ("/metrics", "evil.example:80", 403),
        ("/metrics", "127.0.0.1.evil.example", 403),
        ("/other", "127.0.0.1", 404),
    ],
)
def test_only_metrics_and_only_for_who_uses_an_address(path: str, host: str, status: int) -> None:
    with endpoint() as served:
        assert get(served.port, path, Host=host)[0] == status


def test_it_listens_on_loopback_alone() -> None:
    with endpoint() as served:
        assert served._server.server_address[0] == "127.0.0.1"


def test_beyond_loopback_a_client_may_call_it_by_any_name(tmp_path: Path) -> None:
    """As Prometheus does in a network of containers. This machine's own clients still find it at loopback."""
    with MetricsEndpoint(0, TOY, {"run": "a"}, host="0.0.0.0") as served:
        assert served._server.server_address[0] == "0.0.0.0"
        assert get(served.port, Host="orchestrator:9100")[0] == 200
        served.write_target(tmp_path, "toy")
        (target,) = json.loads((tmp_path / "prometheus" / "toy.json").read_text())
        assert target["targets"] == [f"127.0.0.1:{served.port}"]
    with pytest.raises(OSError, match="prometheus_host is an address of this machine"):
        MetricsEndpoint(0, TOY, {"run": "a"}, host="192.0.2.1").__enter__()


def test_a_port_in_use_is_an_error_that_says_what_to_do() -> None:
    with taken_port() as port, pytest.raises(OSError, match=f"prometheus_port = {port}: .*or 0 for any free one"):
        endpoint(port).__enter__()


def test_the_file_for_discovery_is_there_while_it_serves(tmp_path: Path) -> None:
    job = tmp_path / "job-1"
    with endpoint() as served:
        served.write_target(job, "toy_a")
        (target,) = json.loads((job / "prometheus" / "toy_a.json").read_text())
        assert target == {
            "targets": [f"127.0.0.1:{served.port}"],
            "labels": {"counterpoint_job": "job-1", "process": "toy"},
        }
    assert list((job / "prometheus").iterdir()) == []


def test_a_directory_that_cannot_be_written_is_only_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "prometheus").write_text("a file")
    with endpoint() as served:
        served.write_target(tmp_path)
        assert get(served.port)[0] == 200
    assert "Prometheus does not find this process" in caplog.text


@pytest.mark.slow
def test_clients_that_say_nothing_keep_no_others_out_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.transport.telemetry.endpoint.REQUEST_SECONDS", 0.5)
    with endpoint() as served:
        silent = [socket.create_connection(("127.0.0.1", served.port), timeout=60) for _ in range(12)]
        try:
            for connection in silent:  # each is closed: at once, or after the time that it has
                assert connection.recv(1) == b""
            wait_until(lambda: _answers(served.port), "a place for another client")
        finally:
            for connection in silent:
                connection.close()


@pytest.mark.slow
def test_clients_that_send_a_byte_now_and_then_keep_no_others_out_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.transport.telemetry.endpoint.REQUEST_SECONDS", 0.5)
    with endpoint() as served, ExitStack() as connections:
        slow = [connections.enter_context(socket.create_connection(("127.0.0.1", served.port))) for _ in range(4)]

        def all_have_been_cut_off() -> bool:
            for connection in list(slow):
                try:
                    connection.sendall(b"G")
                except OSError:
                    slow.remove(connection)
            return not slow

        wait_until(all_have_been_cut_off, "the end of the slow clients")
        wait_until(lambda: _answers(served.port), "a place for another client")


def _answers(port: int) -> bool:
    try:
        return get(port)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def test_nothing_is_left_after_it() -> None:
    before = set(threading.enumerate())
    for _ in range(3):
        with endpoint() as served:
            get(served.port)
    ours = {"scrape", "prometheus"}  # other tests' servers may start threads meanwhile
    left = [thread for thread in threading.enumerate() if thread.name in ours and thread not in before]
    for thread in left:
        thread.join(60)
        assert not thread.is_alive(), thread
