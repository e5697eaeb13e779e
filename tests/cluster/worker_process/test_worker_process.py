"""The process of a worker of a class: its hooks in order, and what becomes of each failure."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from counterpoint.transport.process.keeper import messages
from tests.cluster.worker_process.process import worker_process
from tests.support.polling import DEADLINE_SECONDS, wait_until

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("hook", ["__init__", "setup", "self_check", "start", "on_failover", "stop"])
def test_each_hook_that_raises_is_named_and_ends_the_process(tmp_path: Path, hook: str) -> None:
    with worker_process(tmp_path, "Failing", config={"hook": hook}) as worker:
        if hook in ("start", "on_failover", "stop"):
            worker.wait_for_start()
            order = {"start": None, "on_failover": messages.FAILOVER, "stop": messages.STOP}[hook]
            if order is not None:
                worker.send(order, notice=1, failed=[])
        assert worker.end() == 1
        assert worker.said(messages.FAILED)[0]["reason"] == f"`{hook}` raised RuntimeError: in {hook}"
        assert "Traceback (most recent call last)" in worker.log


def test_the_hooks_of_init_have_names_with_an_underscore_too(tmp_path: Path) -> None:
    with worker_process(tmp_path, "Underscored") as worker:
        assert worker.end() == 1
        assert worker.hooks == ["_setup", "_self_check"]
        assert worker.said(messages.FAILED)[0]["reason"] == "`self_check` raised RuntimeError: unfit"


@pytest.mark.parametrize(("name", "rank"), [("Leader", 0), ("Plain", -1)])
def test_a_class_of_the_other_kind_is_refused(tmp_path: Path, name: str, rank: int) -> None:
    with worker_process(tmp_path, name, rank=rank) as worker:
        assert worker.end() == 1
        assert "expected a subclass of" in worker.said(messages.FAILED)[0]["reason"]


def test_sys_exit_in_a_background_hook_ends_the_process_with_its_code(tmp_path: Path) -> None:
    with worker_process(tmp_path, "Failing", config={"hook": "on_failover", "exit": 9}) as worker:
        worker.wait_for_start()
        worker.send(messages.FAILOVER, notice=1, failed=[])
        assert worker.end() == 9
        assert worker.said(messages.FAILED)[0]["reason"] == "`on_failover` called sys.exit(9)"


def test_sys_exit_in_start_is_no_end_of_the_work(tmp_path: Path) -> None:
    with worker_process(tmp_path, "Failing", task=True, config={"hook": "start", "exit": 0}) as worker:
        worker.wait_for_start()
        assert worker.end() == 0
        assert worker.said(messages.FAILED)[0]["reason"] == "`start` called sys.exit(0)"
        assert not worker.said(messages.FINISHED)


def test_what_a_hook_says_may_be_no_text(tmp_path: Path) -> None:
    with worker_process(tmp_path, "Failing", config={"hook": "on_failover", "unsendable": True}) as worker:
        worker.wait_for_start()
        worker.send(messages.FAILOVER, notice=1, failed=[])
        assert worker.end() == 1
        assert worker.said(messages.FAILED)[0]["reason"] == r"`on_failover` raised RuntimeError: in on_failover\udcff"


def test_threads_that_a_failed_worker_left_do_not_keep_its_process(tmp_path: Path) -> None:
    with worker_process(tmp_path, "Failing", config={"hook": "setup", "thread": True}) as worker:
        assert worker.end() == 1
        assert "threads that did not end: ['MainThread', 'left']" in worker.log


def test_a_status_that_raises_is_shown_and_the_worker_goes_on(tmp_path: Path) -> None:
    with worker_process(tmp_path, "Failing", config={"hook": "status"}) as worker:
        worker.wait_for_start()
        shown = "status() raised RuntimeError: in status"
        wait_until(lambda: any(one["status"] == shown for one in worker.said(messages.ALIVE)), "the status")
        worker.send(messages.STOP)
        assert worker.end() == 0


def test_a_stop_within_setup_skips_what_would_follow(tmp_path: Path) -> None:
    with worker_process(tmp_path, "SlowSetup") as worker:
        wait_until(lambda: "setup" in worker.hooks, "setup")
        worker.send(messages.STOP)
        assert worker.end() == 0
        assert worker.hooks == ["setup", "setup ended", "stop"]
        assert not worker.said(messages.READY)


def test_sigterm_is_a_request_to_stop_that_start_can_see(tmp_path: Path) -> None:
    with worker_process(tmp_path, "Patient", task=True) as worker:
        worker.wait_for_start()
        worker.process.send_signal(signal.SIGTERM)
        assert worker.end() == 143, "as any process that a signal ended before its work was complete"
        assert sorted(worker.hooks) == ["start saw the stop", "stop"]
        assert not worker.said(messages.FINISHED), "its work is not done"


def test_a_task_ends_once_its_work_is_done(tmp_path: Path) -> None:
    with worker_process(tmp_path, "Plain", task=True) as worker:
        worker.wait_for_start()
        assert worker.end() == 0
        assert worker.said(messages.FINISHED)
        assert worker.hooks == ["__init__", "setup", "self_check", "start", "stop"]
        assert "INFO tests.cluster.worker_process.workers: a line for people" in worker.log


@pytest.mark.parametrize(("task", "is_open"), [(True, True), (True, False), (False, True)])
def test_a_task_that_leaves_open_what_others_wait_for_has_not_completed_its_work(
    tmp_path: Path, task: bool, is_open: bool
) -> None:
    with worker_process(tmp_path, "Leaving", task=task, config={"open": is_open}) as worker:
        worker.wait_for_start()
        if task and is_open:
            assert worker.end() == 1
            assert "it returned, and has not ended: its stream" in worker.said(messages.FAILED)[0]["reason"]
            return
        wait_until(lambda: bool(worker.said(messages.FINISHED)), "its end")
        worker.send(messages.STOP)
        assert worker.end() == 0


def test_a_finished_task_that_is_told_to_stop_stops_once(tmp_path: Path) -> None:
    with worker_process(tmp_path, "SlowStop", task=True) as worker:
        worker.wait_for_start()
        wait_until(lambda: "stop" in worker.hooks, "stop")
        worker.send(messages.STOP)
        worker.process.send_signal(signal.SIGTERM)
        (tmp_path / "go on").touch()
        assert worker.end() == 0
        assert worker.hooks == ["stop", "stop saw context.stop"]


def test_a_stop_that_raises_does_not_undo_the_work(tmp_path: Path) -> None:
    with worker_process(tmp_path, "Failing", task=True, config={"hook": "stop"}) as worker:
        worker.wait_for_start()
        assert worker.end() == 1
        kinds = [message["kind"] for message in worker.messages if message["kind"] != messages.ALIVE]
        assert kinds[-2:] == [messages.FINISHED, messages.FAILED], "the work was complete before"


def test_the_process_ends_when_its_keeper_is_gone(tmp_path: Path) -> None:
    with worker_process(tmp_path, "Patient") as worker:
        worker.wait_for_start()
        worker.leave()
        assert worker.process.wait(DEADLINE_SECONDS) == 70


def test_what_is_no_worker_is_refused_by_name(tmp_path: Path) -> None:
    with worker_process(tmp_path, "Sequence") as worker:
        assert worker.end() == 1
        assert "expected a subclass of Worker" in worker.said(messages.FAILED)[0]["reason"]


def test_a_class_is_found_in_the_given_directories_first(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from counterpoint.cluster.worker import Worker\nclass Mine(Worker):\n    pass\n")
    with worker_process(tmp_path, "", import_path="mine:Mine", path=[str(tmp_path)]) as worker:
        worker.wait_for(messages.READY)
