"""A ServiceWorker ends as rank 0 ends, asks it alone to stop, and notices that it is late or silent; the ranks are stand-ins."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from counterpoint.cluster.elastic.elastic_worker import StaleCall
from counterpoint.cluster.elastic.service import RanksFailed, ServiceWorker
from counterpoint.cluster.worker import Context, Member
from counterpoint.cluster.worker_process.host import HookEndedError, call
from tests.support.fake_ranks import FakeRanks
from tests.support.polling import DEADLINE_SECONDS, wait_until

pytestmark = pytest.mark.slow


class Alone(Context):
    """A context without others."""

    def members(self, role: str) -> Sequence[Member]:
        return []


@dataclass
class Service:
    """A worker in a thread, whose round has been started."""

    worker: ServiceWorker
    started: bool = True
    real: bool = False
    end: BaseException | None = None
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name="start")
        if self.started:
            self.thread.start()
        asyncio.run(self.worker.start_elastic_job(1, 1, [["trainer-0", 1]]))
        wait_until(lambda: self.real or bool(FakeRanks.started), "the ranks")

    def _run(self) -> None:
        try:
            self.worker.start()
        except BaseException as error:  # noqa: BLE001 - for the test to look at
            self.end = error

    @property
    def ranks(self) -> FakeRanks:
        return FakeRanks.started[-1]

    def says(self, *lines: str) -> None:
        self.ranks.says(*lines)

    def wait(self) -> BaseException | None:
        if self.started:
            self.thread.join(60)
            assert not self.thread.is_alive()
        return self.end

    @property
    def activity(self) -> str:
        return self.worker._report().activity.value


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Makes a service; its config is given."""
    monkeypatch.setattr("counterpoint.cluster.elastic.elastic_worker.RanksProcess", FakeRanks)
    monkeypatch.setenv("NOTIFY_SOCKET", "")
    FakeRanks.started.clear()
    made: list[Service] = []

    def make(started: bool = True, **config: Any) -> Service:
        context = Alone(
            "job", "trainer", 0, 1, "trainer-0", 1, {"module": "train", "check": False, **config}, str(tmp_path), "node"
        )
        made.append(Service(ServiceWorker(context), started))
        return made[-1]

    yield make
    for each in made:
        each.worker.stop()
        each.ranks.end(0.0)
        each.wait()
    FakeRanks.started.clear()


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (["READY=1", "EXIT_STATUS=0"], 0),
        (["READY=1", "EXIT_STATUS=3"], 3),
        (["EXIT_STATUS=2"], 2),
        (["READY=1"], None),
        (["READY=1", "EXIT_STATUS=143"], None),  # rank 0 took the end of the others for a request
    ],
)
def test_it_ends_with_rank_zeros_code_unless_a_rank_died(service: Any, said: list[str], code: int | None) -> None:
    job = service()
    job.says(*said)
    job.ranks.fail("rank 1 was ended by SIGKILL")
    end = job.wait()
    if code is None:
        assert isinstance(end, RanksFailed)
        assert str(end) == "rank 1 was ended by SIGKILL"
    else:
        assert isinstance(end, SystemExit)
        assert end.code == code


@pytest.mark.parametrize(
    ("said", "code", "reason"),
    [
        (["EXIT_STATUS=2"], 2, "`start` called sys.exit(2): no memory"),
        ([], 1, "rank 1 ended with exit code 1: no memory"),
    ],
)
def test_its_end_has_the_reason_that_a_rank_gave(service: Any, said: list[str], code: int, reason: str) -> None:
    job = service()
    job.says("X_FAILURE=no memory", *said)
    job.ranks.fail("rank 1 ended with exit code 1")
    with pytest.raises(HookEndedError, match=re.escape(reason)) as raised:
        call("start", raising(job.wait()))
    assert raised.value.code == code


def test_a_worker_that_ends_tells_nothing_but_its_end(service: Any) -> None:
    """The master must not see before that its ranks are gone: it would have it stopped, and call it unfit."""
    job = service()
    before = job.activity
    job.ranks.fail("rank 0 was ended by SIGKILL")
    assert isinstance(job.wait(), RanksFailed)
    assert job.activity == before
    asyncio.run(job.worker.stop_round(1, 1))
    with pytest.raises(StaleCall, match="about to end"):
        asyncio.run(job.worker.start_elastic_job(1, 2, [["trainer-0", 1]]))


def raising(error: BaseException | None) -> Callable[[], None]:
    def hook() -> None:
        assert error is not None
        raise error

    return hook


def test_its_own_end_and_no_report_tells_that_its_ranks_have_ended(service: Any) -> None:
    """The master would have it end ranks that are gone, and the worker would live on without rank 0's exit code."""
    job = service(started=False)
    for code in (0, 1):
        job.ranks.ended = code
        assert job.activity == "JOINING"
    job.worker._close()


def test_ranks_that_compute_have_more_time(service: Any) -> None:
    job = service(ready_seconds=600.0)
    job.says("EXTEND_TIMEOUT_USEC=60000000")
    wait_until(lambda: "EXTEND_TIMEOUT_USEC" in job.ranks.said, "its message to be heard")
    job.ranks.began -= 601.0
    assert job.worker._trouble(job.ranks) == ""
    job.says("READY=1")
    wait_until(lambda: job.activity == "TRAINING", "the training")


def test_the_ranks_train_once_rank_zero_is_ready(service: Any) -> None:
    job = service()
    assert job.activity == "JOINING"
    job.says("READY=1")
    wait_until(lambda: job.activity == "TRAINING", "the training")


def test_a_node_without_rank_zero_does_not_wait_for_it(service: Any) -> None:
    job = service(ready_seconds=0.01)
    job.ranks.said["X_NODE_RANK"] = ("1", 0.0)
    wait_until(lambda: job.activity == "TRAINING", "the training")


@pytest.mark.parametrize(
    ("config", "said", "words"),
    [
        ({"ready_seconds": 0.05}, [], "rank 0 was not ready within 0.05 s"),
        ({"silence_seconds": 0.05}, ["READY=1"], "rank 0 was silent for 0.05 s"),
    ],
)
def test_ranks_that_are_late_or_silent_are_killed(service: Any, config: Any, said: list[str], words: str) -> None:
    job = service(**config)
    job.says(*said)
    assert words in str(job.wait())
    assert job.ranks.code == 137


@pytest.mark.parametrize(("said", "code"), [("EXIT_STATUS=143", 143), ("EXIT_STATUS=0", None)])
def test_a_stop_is_for_rank_zero_alone(service: Any, said: str, code: int | None) -> None:
    with subprocess.Popen(["sleep", "60"]) as rank_zero:
        job = service()
        job.says(f"MAINPID={rank_zero.pid}", "READY=1")
        wait_until(lambda: job.activity == "TRAINING", "the training")
        job.worker.stop()
        assert rank_zero.wait(DEADLINE_SECONDS) == -signal.SIGTERM
        assert job.ranks.code is None
        job.says(said)
        job.ranks.fail("rank 0 ended with exit code 143")
        end = job.wait()
        assert (end.code if isinstance(end, SystemExit) else end) == code


def test_a_stop_before_rank_zero_is_there_ends_all(service: Any) -> None:
    job = service()
    job.worker.stop()
    end = job.wait()
    assert isinstance(end, SystemExit)
    assert end.code == 143
    assert job.ranks.code == 143


def test_ranks_that_were_asked_by_the_master_end_idle(service: Any) -> None:
    job = service()
    job.says("READY=1")
    wait_until(lambda: job.activity == "TRAINING", "the training")
    asyncio.run(job.worker.stop_round(1, 1))
    wait_until(lambda: job.activity == "IDLE", "the end of the ranks")
    asyncio.run(job.worker.start_elastic_job(1, 2, [["trainer-0", 1]]))
    wait_until(lambda: len(FakeRanks.started) == 2, "the next round")
    assert job.activity == "JOINING", "what rank 0 said in the round before does not count"


SCRIPT = """
import os, signal, sys, time
from counterpoint.transport.process.notify import notify
def end(*_):
    notify("EXIT_STATUS=143")
    sys.exit(143)
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, end)
    notify(f"MAINPID={os.getpid()}")
    notify("READY=1")
time.sleep(600)
"""


def test_real_ranks_are_heard_and_only_rank_zero_is_asked_to_end(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(SCRIPT)
    config = {"script": str(tmp_path / "ranks.py"), "local_ranks": 2, "check": False}
    context = Alone("job", "trainer", 0, 1, "trainer-0", 1, config, str(tmp_path), "node")
    job = Service(ServiceWorker(context), real=True)
    wait_until(lambda: job.activity == "TRAINING", "the training", details=lambda: f"{job.worker.status()} {job.end!r}")
    assert job.worker._ranks is not None
    ranks = job.worker._ranks
    job.worker.stop()
    end = job.wait()
    assert isinstance(end, SystemExit)
    assert end.code == 143
    assert ranks.failure == "rank 0 ended with exit code 143"
