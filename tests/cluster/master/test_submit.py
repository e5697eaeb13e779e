"""Whole jobs of real processes on the local backend: submitted, watched, stopped, and with their master killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from counterpoint.cluster import (
    ClusterError,
    ControlError,
    JobBuilder,
    JobFailed,
    JobHandle,
    JobSpec,
    NoMaster,
    NotStarted,
    PrimeMaster,
    submit,
)
from counterpoint.cluster.job_files import read_master
from tests.support.polling import DEADLINE_SECONDS

pytestmark = pytest.mark.slow

WORKERS = "tests.cluster.master.tiny_workers"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A job's directory. What a failed test has left running there is killed."""
    yield tmp_path / "job"
    for pid in processes_of(tmp_path):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not processes_of(tmp_path))


def processes_of(directory: Path) -> list[int]:
    """The masters and keepers of a job, which name its directory in their commands."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if str(directory).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.02)


def two_roles() -> JobSpec:
    return (
        JobBuilder("tiny", lease_seconds=60.0)  # the keepers wait for the next master, however slow its start
        .role("service", worker=f"{WORKERS}:Service")
        .role("counter", worker=f"{WORKERS}:Counter", count=2, task=True, after=("service",))
        .build()
    )


def test_a_job_runs_to_its_end_and_is_seen_from_another_handle(directory: Path) -> None:
    handle = submit(two_roles(), directory, standby=False)
    with pytest.raises(ClusterError, match="has a job already"):
        submit(two_roles(), directory)
    other = JobHandle(str(directory))
    until((directory / "counter-1.started").exists)
    until(lambda: other.status().stage == "RUNNING")
    assert {one.worker for one in other.get_nodes_by_role("counter")} == {"counter-0", "counter-1"}
    (directory / "go").touch()
    assert handle.wait(DEADLINE_SECONDS).code == 0
    status = other.status()
    assert (status.stage, [one.incarnation for one in status.workers]) == ("STOPPED", [1, 1, 1])
    assert other.logs("counter-0") == "counter-0 has started"
    other.stop()  # nothing happens any more
    until(lambda: not processes_of(directory))


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_the_death_of_the_master_costs_nothing(directory: Path, end: signal.Signals) -> None:
    """One that hangs is killed by its standby."""
    handle = submit(two_roles(), directory)
    until(lambda: (directory / "counter-0.started").exists() and (directory / "counter-1.started").exists())
    first = read_master(directory)
    assert first is not None
    until(lambda: len(processes_of(directory)) > 2)  # the standby lives
    os.kill(first.pid, end)

    def taken_over() -> bool:
        now = read_master(directory)
        return now is not None and now.epoch > first.epoch

    until(taken_over)  # by the standby
    (directory / "go").touch()
    assert handle.wait(DEADLINE_SECONDS).code == 0
    assert [(directory / f"counter-{rank}.started").read_text() for rank in (0, 1)] == ["1\n", "1\n"]
    until(lambda: not processes_of(directory))


@pytest.mark.parametrize(
    ("standby", "fault"),
    [(False, "before_instruction:4"), *((True, f"after_write:{number}") for number in (2, 4, 6, 8))],
)
def test_another_master_goes_on_wherever_the_first_one_was_killed(
    directory: Path, monkeypatch: pytest.MonkeyPatch, standby: bool, fault: str
) -> None:
    """After writes of the state from INIT to RUNNING, before what follows from them. `wait` starts it without a standby."""
    monkeypatch.setenv("CLUSTER_FAULT", fault)
    try:
        handle = submit(two_roles(), directory, standby=standby)
    except ClusterError:
        handle = JobHandle(directory)  # it died before it answered
    monkeypatch.delenv("CLUSTER_FAULT")
    (directory / "go").touch()
    assert handle.wait(DEADLINE_SECONDS).code == 0
    assert handle.status().epoch == 2
    assert [(directory / f"counter-{rank}.started").read_text() for rank in (0, 1)] == ["1\n", "1\n"]
    until(lambda: not processes_of(directory))


@pytest.mark.parametrize(("given", "code"), [({}, 143), ({"code": 7}, 7)])
def test_a_job_is_stopped(directory: Path, given: dict[str, int], code: int) -> None:
    """Its exit code is never 0, since its work is not complete."""
    handle = submit(two_roles(), directory, standby=False)
    until((directory / "counter-0.started").exists)
    handle.stop("enough", **given)
    with pytest.raises(JobFailed, match="enough") as failure:
        handle.wait(DEADLINE_SECONDS)
    assert failure.value.code == code


@pytest.mark.parametrize("end", ["SIGTERM", "sys.exit", "os._exit"])
def test_a_task_that_ends_without_an_error_before_its_work_is_started_again(directory: Path, end: str) -> None:
    handle = submit(two_roles(), directory, standby=False)
    until(lambda: (directory / "counter-0.started").exists() and (directory / "counter-1.started").exists())
    if end == "SIGTERM":
        (victim,) = [one.pid for one in handle.status().workers if one.worker == "counter-0"]
        os.kill(victim, signal.SIGTERM)
    else:
        (directory / "counter-0.end").write_text(end)
    until(lambda: (directory / "counter-0.started").read_text() == "1\n2\n")
    (directory / "go").touch()
    assert handle.wait(DEADLINE_SECONDS).code == 0
    assert (directory / "counter-1.started").read_text() == "1\n"


def test_a_job_that_does_not_fit_says_what_is_missing(directory: Path) -> None:
    spec = JobBuilder("large").role("large", worker=f"{WORKERS}:Service", resources={"cpu": 5000}).build()
    handle = submit(spec, directory, standby=False)
    with pytest.raises(JobFailed, match="cpu: wanted 5000, present"):
        handle.wait(DEADLINE_SECONDS)


def test_a_job_that_is_not_started_is_in_init_and_says_so(directory: Path) -> None:
    master = PrimeMaster.create(two_roles(), directory)
    status = master.status()
    assert (status.stage, status.epoch, status.outcome) == ("INIT", 0, None)
    assert "not started" in status.trouble
    assert {one.stage for one in status.workers} == {"INIT"}
    roles = {one.role for one in status.workers}
    for role in roles:
        assert master.get_nodes_by_role(role) == tuple(one for one in status.workers if one.role == role)
    with pytest.raises(ControlError, match="no role 'nobody'"):
        master.get_nodes_by_role("nobody")
    with pytest.raises(NotStarted, match=r"not started: `PrimeMaster\.start`"):
        master.stop()
    with pytest.raises(NotStarted, match=r"not started: `PrimeMaster\.start`"):
        master.scale(min(roles), 1)
    assert JobHandle(directory).status() == status


def test_a_directory_without_a_master_says_so(directory: Path) -> None:
    handle = submit(two_roles(), directory, standby=False)
    known = read_master(directory)
    assert known is not None
    os.kill(known.pid, signal.SIGKILL)
    until(lambda: not handle._master_lives())
    with pytest.raises(NoMaster, match="no master answers"):
        handle.status()
