"""What people are shown of a job's workers: names, states, and which part of a log is this job's."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from counterpoint.cluster.attended.views import Views, shown_outcome
from counterpoint.cluster.backends.base import WorkerHeartbeat
from counterpoint.cluster.manager.events import Outcome, WorkerExited
from counterpoint.cluster.master.prime_master import MasterTerm
from counterpoint.cluster.spec import JobSpec
from counterpoint.cluster.worker_view import State, WorkerView
from tests.cluster.manager.driver import Driver, command


class Shown:
    """A job of one command, its log, and its views."""

    def __init__(self, directory: Path, **options: object) -> None:
        self.log = directory / "a.log"
        self.driver = Driver(command("a", log_file=self.log, **options))
        self.driver.begin()
        self._views = Views(self.driver.manager.spec, directory)
        self.beats: dict[str, WorkerHeartbeat] = {}
        self.exits: dict[str, WorkerExited] = {}
        self.silence = 0.0
        self.manager = self.driver.manager

    def silent_for(self, worker: str) -> float:
        return self.silence

    @property
    def view(self) -> WorkerView:
        self._views.update(cast(MasterTerm, self))
        (view,) = self._views.all()
        return view


def test_a_worker_is_shown_by_the_name_of_its_role_if_it_is_the_only_one() -> None:
    spec = JobSpec(name="job", roles=(command("a"), command("b", count=2), command("a-0-x")))
    names = [view.name for view in Views(spec, Path("directory")).all()]
    assert names == ["a", "b-0", "b-1", "a-0-x"]
    outcome = shown_outcome(spec, Outcome(1, "a-0 failed after b-1 and a-0-x-0: see a-0.log", "a-0"))
    assert outcome == Outcome(1, "a failed after b-1 and a-0-x: see a-0.log", "a")


def test_what_a_heartbeat_says_is_shown_only_of_the_incarnation_that_sent_it(tmp_path: Path) -> None:
    job = Shown(tmp_path, max_restarts=3)
    assert job.view.state is State.STARTING
    job.beats["a-0"] = WorkerHeartbeat("a-0", 1, "loading", "its engine is slow", 77)
    assert (job.view.pid, job.view.status, job.view.trouble) == (77, "loading", "its engine is slow")
    job.silence = 16.0
    assert job.view.trouble.startswith("silent since ")
    assert job.view.trouble.endswith("; its engine is slow")
    job.driver.exit("a-0", 137, 1.0)
    assert (job.view.state, job.view.pid, job.view.trouble) == (State.RESTARTING, None, "")
    job.driver.tick(100.0)
    assert (job.view.state, job.view.pid, job.view.status) == (State.STARTING, None, "")


def test_a_process_that_has_ended_is_not_shown_as_ready_while_nothing_can_be_decided(tmp_path: Path) -> None:
    job = Shown(tmp_path, max_restarts=3)
    job.beats["a-0"] = WorkerHeartbeat("a-0", 1, "serving", "", 77)
    job.driver.ready("a-0")
    assert job.view.state == "ready"
    job.exits["a-0"] = WorkerExited("a-0", 1, 74, "", 1.0)
    assert (job.view.state, job.view.pid) == ("exited", None)
    assert "the disk is full" in job.view.last_death
    job.driver.exit("a-0", 74, 1.0)
    assert job.view.state == "restarting", "what was decided counts"


@pytest.mark.parametrize(("code", "shown"), [(0, "stopping"), (143, "stopping"), (1, "exited"), (137, "exited")])
def test_a_process_that_ends_as_it_was_asked_to_is_not_shown_as_bad(tmp_path: Path, code: int, shown: str) -> None:
    job = Shown(tmp_path)
    job.beats["a-0"] = WorkerHeartbeat("a-0", 1, "serving", "", 77)
    job.driver.ready("a-0")
    job.driver.stop()
    assert (job.view.state, job.view.pid) == ("stopping", 77)
    job.exits["a-0"] = WorkerExited("a-0", 1, code, "", 1.0)
    assert (job.view.state, job.view.pid) == (shown, None)
    assert bool(job.view.last_death) == (shown == "exited")


def test_the_output_of_a_worker_begins_where_its_log_ended_and_anew_once_that_is_put_aside(tmp_path: Path) -> None:
    job = Shown(tmp_path, max_restarts=3)
    job.log.write_text("of old\n")
    assert (job.view.log_from, job.view.log_until) == (7, None)
    job.log.write_text("of old\nthe disk is full\n\n")
    job.driver.exit("a-0", 1, 1.0)
    assert (job.view.last_death, job.view.last_output) == ("ended with exit code 1", "the disk is full")
    job.driver.tick(100.0)
    assert (job.view.log_from, job.view.restarts) == (7, 1)
    job.driver.stop("asked", 0, 101.0)
    assert job.view.log_until == job.log.stat().st_size
    job.log.rename(tmp_path / "a.log.1")
    job.log.write_text("a line that is longer than what was there before\n")
    assert (job.view.log_from, job.view.log_until) == (0, 0)
