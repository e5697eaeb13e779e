"""The notes of a start: a line for each phase, once, of each process, in a file that stays small."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from counterpoint.transport.telemetry import start_phases
from counterpoint.transport.telemetry.start_phases import ENGINE, OVER, START_FILE, Note, append, enter
from tests.support.polling import wait_until


def noted(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in start_phases.variable_of("inference_0", tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(start_phases, "_entered", (0, set()))
    return tmp_path / START_FILE


def test_each_phase_is_noted_once_and_none_after_the_last(file: Path) -> None:
    for phase in ("checks", "checks", "waits for a server", "checks", OVER, "first update"):
        enter(phase)
    lines = noted(file)
    assert [line["phase"] for line in lines] == ["checks", "waits for a server", OVER]
    assert {(line["process"], line["pid"]) for line in lines} == {("inference_0", os.getpid())}
    assert 0 < lines[0]["began"] <= lines[0]["at"] <= lines[-1]["at"] <= time.time()
    assert 0 < lines[0]["cpu"] <= lines[-1]["cpu"]


def test_a_forked_process_notes_its_own_phases(file: Path) -> None:
    enter(OVER)
    if (child := os.fork()) == 0:
        enter("loads the model", ENGINE)
        os._exit(0)
    os.waitpid(child, 0)
    assert [(line["process"], line["pid"], line["phase"]) for line in noted(file)] == [
        ("inference_0", os.getpid(), OVER),
        ("inference_0 engine", child, "loads the model"),
    ]


def test_a_thread_may_write(file: Path) -> None:
    enter("first step", beside=True)
    wait_until(file.exists, "the file of the thread")
    wait_until(lambda: [line["phase"] for line in noted(file)] == ["first step"], "the thread's note")


def test_nothing_is_noted_outside_of_a_job_or_where_it_cannot_be(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.symlink_to(file.with_name("elsewhere"))
    enter("checks")
    monkeypatch.delenv(start_phases.VARIABLE)
    enter("first update")
    assert not file.exists()


def test_a_machine_without_proc_or_room_for_a_thread_goes_on(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("/proc/self/stat")

    def refuse(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(start_phases, "open", fail, raising=False)
    enter("checks")
    (line,) = noted(file)
    assert 0 < line["began"] <= line["at"]
    monkeypatch.setattr(Thread, "start", refuse)
    enter("first step", beside=True)
    assert noted(file) == [line]


def test_a_file_begins_anew_and_does_not_grow_beyond_its_limit(file: Path) -> None:
    notes = [Note(f"phase {number}", 1.0, 1.0) for number in range(10)]
    append(file, "trainer", notes)
    append(file, "supervisor", notes[:1], anew=True)
    assert [line["process"] for line in noted(file)] == ["supervisor"]
    while (size := file.stat().st_size) < start_phases.MAX_BYTES:
        append(file, "trainer", notes)
        if file.stat().st_size == size:
            break
    assert start_phases.MAX_BYTES - 10 * 200 < size <= start_phases.MAX_BYTES
