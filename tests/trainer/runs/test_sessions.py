"""Rank 0's side of the wire by itself: messages in, answers out, over a wire that is a list."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest

from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.runs.manager import MultiRunManager
from counterpoint.trainer.runs.record import RunStage
from counterpoint.trainer.runs.run import Run
from counterpoint.trainer.work.order import Order
from counterpoint.trainer.work.sessions import MAX_CALLERS, Sessions
from counterpoint.trainer.work.sources import Item
from counterpoint.transport.messages import Acknowledged, Bye, Commit, Hello, Ready, Rejected, ToOrchestrator, Waiting
from counterpoint.transport.outages import OutageKind
from counterpoint.transport.records import Batch
from tests.trainer.conftest import end_step, make_batch, make_run_config, new_order, occupy_slot, take_batch
from tests.trainer.runs.test_manager import write


class Wire:
    """A `BatchReceiver` that delivers the messages in `arriving`, and keeps the sent ones."""

    rejected = 0
    reaches = True
    """Whether a message reaches its orchestrator."""

    def __init__(self) -> None:
        self.arriving: list[tuple[str, Hello | Batch | Commit | Bye]] = []
        self.sent: list[tuple[str, ToOrchestrator]] = []

    def receive(self, timeout: float) -> tuple[str, Hello | Batch | Commit | Bye] | None:
        return self.arriving.pop(0) if self.arriving else None

    def take_invalid_batches(self) -> dict[str, str]:
        return {}

    def send(self, run_id: str, message: ToOrchestrator) -> bool:
        self.sent.append((run_id, message))
        return self.reaches

    def close(self) -> None:
        """There is nothing to free."""


def make_sessions(directory: Path, order: Order[Item] | None = None) -> tuple[Sessions, MultiRunManager, Wire]:
    """The only slot has `order`."""
    config = TrainerConfig(output_dir=directory, model="/model")
    wire, manager = Wire(), MultiRunManager(directory, 1)
    return Sessions(config, wire, manager, {0: new_order() if order is None else order}), manager, wire


def make_run(directory: Path, manager: MultiRunManager) -> Run:
    return occupy_slot(manager.registry, make_run_config(directory, directory, steps=100))


def deliver(sessions: Sessions, wire: Wire, *messages: Hello | Batch | Commit | Bye, run_id: str = "default") -> None:
    """Delivers messages of a run that does nothing wrong."""
    wire.arriving += [(run_id, message) for message in messages]
    assert list(sessions.receive(0.0)) == []


def test_an_acknowledged_batch_makes_room_for_another_while_it_is_trained(tmp_path: Path) -> None:
    """A step of many rows takes a while, and the orchestrator sends on as soon as it is acknowledged."""
    order = new_order()
    sessions, manager, wire = make_sessions(tmp_path, order)
    run = make_run(tmp_path, manager)
    deliver(sessions, wire, Hello("default", 0))
    sessions.admit(run)
    assert isinstance(wire.sent[-1][1], Ready)
    credit = wire.sent[-1][1].credit
    deliver(sessions, wire, Commit(100, wire.sent[-1][1].session))
    deliver(sessions, wire, *(make_batch(step) for step in range(1, credit + 1)))
    for step in range(1, 2 * credit):
        batch = take_batch(sessions, run, order)
        assert batch is not None
        assert wire.sent[-1] == ("default", Acknowledged(step, 0))
        deliver(sessions, wire, make_batch(step + credit))
        assert wire.sent[-1] == ("default", Acknowledged(step, 0)), "the batch that there was room for is taken"
        deliver(sessions, wire, make_batch(step + credit + 1))
        assert isinstance(wire.sent[-1][1], Rejected), "and the one after it is not"
        end_step(run, order)


def test_a_batch_is_trained_once_its_step_is_committed_and_forgotten_when_the_run_begins_anew(tmp_path: Path) -> None:
    order = new_order()
    sessions, manager, wire = make_sessions(tmp_path, order)
    run = make_run(tmp_path, manager)
    deliver(sessions, wire, Hello("default", 0))
    sessions.admit(run)
    deliver(sessions, wire, make_batch(1), make_batch(2))
    assert take_batch(sessions, run, order) is None, "not committed"
    deliver(sessions, wire, Commit(1, 0))
    batch = take_batch(sessions, run, order)
    assert batch is not None
    assert batch.step == 1
    end_step(run, order)
    assert take_batch(sessions, run, order) is None
    deliver(sessions, wire, Bye())
    assert order.waiting == {}, "its orchestrator ended before the commit of step 2"
    deliver(sessions, wire, Hello("default", 1), make_batch(2), make_batch(3), Commit(2, 0), Hello("default", 1))
    assert list(order.waiting) == [2], "step 3 belonged to an earlier session, and may never be committed"
    batch = take_batch(sessions, run, order)
    assert batch is not None
    assert batch.step == 2


def test_a_run_made_anew_under_an_old_id_is_not_welcomed_as_the_old_one(tmp_path: Path) -> None:
    """Rows may take minutes, so its orchestrator may call before the deletion is discovered. A READY for the old run's next step
    would end that orchestrator."""
    write(tmp_path, "a")
    sessions, manager, wire = make_sessions(tmp_path)
    manager.discover_runs()
    manager.registry.in_slot(0).progress.step = 5
    sessions.admit(manager.registry.in_slot(0))
    shutil.rmtree(tmp_path / "run_a")
    write(tmp_path, "a")
    deliver(sessions, wire, Hello("a", 0), run_id="a")
    assert wire.sent == []
    assert sessions.has_news, "the directories are scanned promptly"
    manager.discover_runs({"a"})
    sessions.admit(manager.registry.in_slot(0))
    assert [message.next_step for _, message in wire.sent if isinstance(message, Ready)] == [1]


def test_a_flood_of_made_up_names_is_forgotten_and_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    sessions, _, wire = make_sessions(tmp_path)
    (tmp_path / "run_honest").mkdir()
    names = [f"name-{number}" for number in range(3 * MAX_CALLERS)]
    for name in names:
        deliver(sessions, wire, Hello(name, 0), run_id=name)
    deliver(sessions, wire, Hello("honest", 0), run_id="honest")
    assert {run_id for run_id, message in wire.sent if isinstance(message, Bye)} == set(names[MAX_CALLERS:])
    assert len(wire.sent) == 2 * MAX_CALLERS
    wire.sent.clear()
    sessions.answer()
    assert {run_id for run_id, message in wire.sent if isinstance(message, Waiting)} == {*names[:MAX_CALLERS], "honest"}
    monkeypatch.setattr("counterpoint.trainer.work.sessions.ANSWER_SECONDS", 0.0)
    wire.reaches = False
    sessions.answer()
    wire.sent.clear()
    sessions.answer()
    assert wire.sent == [], "whoever cannot be reached is forgotten"
    wire.reaches = True
    deliver(sessions, wire, Hello("late", 0), run_id="late")
    sessions.answer()
    assert [run_id for run_id, message in wire.sent if isinstance(message, Waiting)] == ["late"]
    assert len(caplog.records) < 50


def test_a_run_that_the_trainer_does_not_see_is_waited_for_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mount may come late, or a list on NFS be old: this is no verdict, for a new run and for one made anew alike."""
    monkeypatch.setattr("counterpoint.trainer.work.sessions.GRACE_SECONDS", -1.0)
    sessions, manager, wire = make_sessions(tmp_path)
    for is_first in (True, False):
        deliver(sessions, wire, Hello("a", 0), run_id="a")
        for _ in range(3):
            monkeypatch.setattr("counterpoint.trainer.work.sessions.ANSWER_SECONDS", 0.0)
            manager.discover_runs({"a"})
            sessions.answer()
            run_id, message = wire.sent[-1]
            assert run_id == "a"
            assert isinstance(message, Waiting)
            assert f"cannot read {tmp_path / 'run_a' / 'control' / 'orch.toml'}" in message.reason
        write(tmp_path, "a")
        with monkeypatch.context() as patch:
            patch.setattr("counterpoint.trainer.runs.control_files.os.scandir", lambda directory: nullcontext([]))
            assert manager.discover_runs({"a"}), "it is opened by its name"
            assert not manager.discover_runs({"a"})
        run = manager.registry.in_slot(0)
        sessions.admit(run)
        assert isinstance(wire.sent[-1][1], Ready)
        if is_first:
            shutil.rmtree(tmp_path / "run_a")
            manager.discover_runs({"a"})
            manager.registry.end("a", RunStage.DELETED)


def test_a_configuration_that_cannot_be_reached_for_a_moment_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a")
    _, manager, _ = make_sessions(tmp_path)
    for number in (errno.ESTALE, errno.EIO, errno.ETIMEDOUT):

        def fail(path: Path, limit: int, number: int = number) -> dict[str, object]:
            raise OSError(number, os.strerror(number), str(path))

        with monkeypatch.context() as patch:
            patch.setattr("counterpoint.trainer.runs.control_files.read_toml", fail)
            assert not manager.discover_runs()
        assert manager.registry.refused == {}
    assert not (tmp_path / "run_a" / "control" / "config_validation_error.txt").exists()
    assert manager.discover_runs()


def test_an_orchestrator_that_is_not_there_is_an_outage_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("counterpoint.trainer.work.sessions.ANSWER_SECONDS", 0.0)
    sessions, manager, wire = make_sessions(tmp_path)
    run = make_run(tmp_path, manager)
    deliver(sessions, wire, Hello("default", 0))
    sessions.admit(run)
    sessions.answer()
    assert sessions.outages.current() == []
    for loss in ("it is cut off", "it leaves"):
        wire.reaches = loss != "it is cut off"
        if wire.reaches:
            deliver(sessions, wire, Bye("drained"))
        sessions.answer()
        (outage,) = sessions.outages.current()
        assert (outage.kind, "run default" in outage.who) == (OutageKind.ORCHESTRATOR, True)
        wire.reaches = True
        deliver(sessions, wire, Hello("default", 0))
        sessions.answer()
        assert sessions.outages.current() == []
    run.progress.step = run.config.steps or 0
    manager.registry.advance(run.slot, 0.0)
    deliver(sessions, wire, Bye("done"))
    assert sessions.outages.current() == [], "nobody is waited for"


def test_what_a_run_repeats_without_end_fills_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    order = new_order()
    sessions, manager, wire = make_sessions(tmp_path, order)
    run = make_run(tmp_path, manager)
    batch = make_batch(1)
    deliver(sessions, wire, Hello("default", 0), *[batch] * 200)
    sessions.admit(run)
    run.progress.step = order.done = 1
    deliver(sessions, wire, *[batch] * 200)
    for _ in range(200):
        deliver(sessions, wire, Bye(), Hello("default", 0))
    assert len(caplog.records) < 50


def test_a_wire_that_never_runs_dry_is_left_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever calls without end keeps the trainer from its rows no longer than `INTAKE_SECONDS`."""
    sessions, _, wire = make_sessions(tmp_path)
    calls = 0

    def receive(timeout: float) -> tuple[str, Hello]:
        nonlocal calls
        calls += 1
        assert calls < 1_000_000, "it is still taking in"
        return "nobody", Hello("nobody", 0)

    monkeypatch.setattr(wire, "receive", receive)
    assert list(sessions.receive(0.0)) == []
    assert calls > 1
