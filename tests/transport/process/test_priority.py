"""The priority of threads that copy: theirs alone is lower, and that of threads that they start."""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
from collections.abc import Callable

import pytest

from tests.support.niceness import own_niceness
from transport.process.priority import NICENESS, lower_own_priority

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is a process's")


def run_in_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_only_the_thread_and_those_that_it_starts_have_the_lower_priority() -> None:
    before = own_niceness()
    found: list[int] = []

    def copy() -> None:
        lower_own_priority()
        found.append(own_niceness())
        run_in_thread(lambda: found.append(own_niceness()))

    run_in_thread(copy)
    assert found == [min(19, before + NICENESS)] * 2
    assert own_niceness() == before


def test_the_lowest_priority_stays() -> None:
    found: list[int] = []

    def copy() -> None:
        for _ in range(19 // NICENESS + 2):
            lower_own_priority()
        found.append(own_niceness())

    run_in_thread(copy)
    assert found == [19]


def test_a_forbidden_call_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    with caplog.at_level(logging.INFO):
        lower_own_priority()
    assert "keeps its priority" in caplog.text
