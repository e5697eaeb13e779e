"""systemd's protocol over a real socket."""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import threading
from pathlib import Path

import pytest

from counterpoint.transport.process.notify import (
    MAX_STATUS,
    Heartbeat,
    NotifySocket,
    StatusLine,
    beating,
    notify,
    notify_failure,
    notify_ready,
)


def test_what_is_said_is_heard_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = NotifySocket()
    monkeypatch.setenv("NOTIFY_SOCKET", listener.address)
    assert notify("STATUS=loading = slow\nWATCHDOG=1")
    notify_ready()
    assert listener.receive() == {"STATUS": "loading = slow", "WATCHDOG": "1"}
    assert listener.receive() == {"READY": "1"}
    assert listener.receive() is None
    listener.close()


def test_a_socket_in_the_filesystem_works_as_systemd_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        assert notify("STOPPING=1")
        assert listener.recv(100) == b"STOPPING=1"


def test_without_a_supervisor_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert notify("READY=1") is False


def test_a_supervisor_that_has_gone_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "@counterpoint-nobody-listens-here")
    monkeypatch.setattr("counterpoint.transport.process.notify._failure", "")
    with caplog.at_level(logging.WARNING):
        assert notify("READY=1") is False
        assert notify("WATCHDOG=1") is False
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == ["READY=1"], "once"
    listener = NotifySocket()
    monkeypatch.setenv("NOTIFY_SOCKET", listener.address)
    assert notify("STATUS=back")
    listener.close()
    with caplog.at_level(logging.WARNING):
        assert notify("STATUS=gone") is False
    assert "STATUS=gone" in caplog.text


def test_a_supervisor_that_does_not_keep_up_never_blocks_the_caller_and_is_a_warning_only_if_that_lasts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listener = NotifySocket()
    monkeypatch.setenv("NOTIFY_SOCKET", listener.address)
    delivered = [notify("WATCHDOG=1") for _ in range(2000)]
    assert delivered[0]
    assert not delivered[-1]
    assert not caplog.records
    monkeypatch.setattr("counterpoint.transport.process.notify._full_since", -math.inf)
    assert not notify("WATCHDOG=1")
    assert not notify("WATCHDOG=1")
    assert len(caplog.records) == 1
    while listener.receive() is not None:
        pass
    assert notify("WATCHDOG=1")
    listener.close()


def test_a_heart_beats_no_oftener_than_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = NotifySocket()
    monkeypatch.setenv("NOTIFY_SOCKET", listener.address)
    monkeypatch.setenv("WATCHDOG_USEC", str(3600 * 10**6))
    heartbeat = Heartbeat()
    for _ in range(100):
        heartbeat.beat()
    assert listener.receive() == {"WATCHDOG": "1"}
    assert listener.receive() is None
    monkeypatch.delenv("WATCHDOG_USEC")
    Heartbeat().beat()
    assert listener.receive() is None, "nobody asked"
    listener.close()


@pytest.mark.parametrize("watchdog", [True, False])
def test_a_ready_that_was_lost_is_sent_again_with_and_without_a_watchdog(
    monkeypatch: pytest.MonkeyPatch, watchdog: bool
) -> None:
    listener = NotifySocket()
    monkeypatch.setenv("NOTIFY_SOCKET", listener.address)
    monkeypatch.setattr("counterpoint.transport.process.notify.READY_AGAIN_SECONDS", 0.01)
    if watchdog:
        monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    else:
        monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    while notify("STATUS=busy"):
        pass
    notify_ready()
    message = None
    while message != {"READY": "1"}:
        assert message in (None, {"STATUS": "busy"})
        assert select.select([listener], [], [], 60)[0]
        message = listener.receive()
    assert listener.receive() is None, "once"
    listener.close()


def test_a_ready_that_was_lost_is_not_sent_after_the_process_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = NotifySocket()
    monkeypatch.setenv("NOTIFY_SOCKET", listener.address)
    monkeypatch.setattr("counterpoint.transport.process.notify.READY_AGAIN_SECONDS", 60.0)
    while notify("STATUS=busy"):
        pass
    before = set(threading.enumerate())
    notify_ready()
    (sender,) = (
        thread for thread in threading.enumerate() if thread not in before and thread.name == "sending READY again"
    )
    notify("STOPPING=1")
    sender.join(60)
    assert not sender.is_alive()
    while (message := listener.receive()) is not None:
        assert message == {"STATUS": "busy"}
    listener.close()


def test_a_role_that_computes_for_long_beats_from_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = NotifySocket()
    monkeypatch.setenv("NOTIFY_SOCKET", listener.address)
    monkeypatch.setenv("WATCHDOG_USEC", "30000")
    with beating():
        for _ in range(3):
            assert select.select([listener], [], [], 60)[0]
            assert listener.receive() == {"WATCHDOG": "1"}
    listener.close()


def test_a_status_is_sent_when_it_changes_and_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    socket = NotifySocket()
    monkeypatch.setenv("NOTIFY_SOCKET", socket.address)
    status = StatusLine()
    for text in ("step 1", "step 1", "step\n2", "word " * 10_000):
        status.show(text)
    sent = []
    while (message := socket.receive()) is not None:
        sent.append(message["STATUS"])
    assert sent[:2] == ["step 1", "step 2"]
    assert len(sent) == 3
    assert len(sent[2]) <= MAX_STATUS
    socket.close()


def test_a_reason_that_no_encoding_has_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = NotifySocket()
    monkeypatch.setenv("NOTIFY_SOCKET", supervisor.address)
    notify_failure("cannot read " + os.fsdecode(b"\xff"))
    assert supervisor.receive() == {"X_FAILURE": "cannot read \\udcff"}
    supervisor.close()
