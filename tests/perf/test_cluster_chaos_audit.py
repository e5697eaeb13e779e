"""The audit of the controller's chaos finds each kind of fault that is planted, and nothing where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import msgpack
import pytest

from perf.chaos.cluster.audit import FAULTS, LOST, LOST_JOBS, MARK, ORPHANS, REPEATED, TWICE, WRONG, audit, marked
from perf.chaos.cluster.witness import Reader, Witness
from tests.support.polling import wait_until

MEMORY = "chaos-audit-of-a-test"


class Job:
    """What a job of one source and one trainer leaves."""

    def __init__(self, place: Path) -> None:
        self.directory, self.temporary = place / "job", place / "tmp"
        (self.directory / "commits").mkdir(parents=True)
        self.temporary.mkdir()
        self.mark = uuid.uuid4().hex
        self.outcome: dict[str, Any] = {"code": 0, "reason": "complete"}
        self.lines: list[tuple[str, int, int, str, Any]] = [
            ("source-0", 1, 10, "opens", 0),
            ("source-0", 1, 10, "stored", 1),
            ("source-0", 2, 12, "opens", 2),
            ("trainer-0", 1, 11, "commits", [["source-0", 0], ["source-0", 1]]),
            ("trainer-0", 2, 13, "commits", [["source-0", 2]]),
            ("source-0", 2, 12, "ends", 3),
        ]
        self.state = [["source-0", 0, 0], ["source-0", 1, 1], ["source-0", 2, 4]]

    def faults(self) -> set[str]:
        (self.directory / "outcome.json").write_text(json.dumps(self.outcome))
        (self.directory / "commits" / "trainer-0.msgpack").write_bytes(
            msgpack.packb({"state": self.state, "positions": {}})
        )
        found = audit(self.directory, self.lines, 1, marked(self.mark), self.temporary, MEMORY).faults
        assert tuple(found) == FAULTS
        return {fault for fault, cases in found.items() if cases}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_job_without_faults(job: Job) -> None:
    assert job.faults() == set()


def test_a_job_that_failed_or_has_no_outcome(job: Job) -> None:
    job.outcome["code"] = 1
    assert job.faults() == {LOST_JOBS}


def test_a_process_that_outlives_the_job(job: Job) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=os.environ | {MARK: job.mark}
    )
    with process:
        wait_until(lambda: job.faults() == {ORPHANS}, "the mark of a process that has just begun")
        process.kill()
    assert job.faults() == set()


def test_a_temporary_file_that_outlives_the_job(job: Job) -> None:
    (job.temporary / "left").touch()
    assert job.faults() == {ORPHANS}


def test_shared_memory_that_outlives_the_job(job: Job) -> None:
    path = Path("/dev/shm") / f"{MEMORY}-{os.getpid()}"
    path.touch()
    try:
        assert job.faults() == {ORPHANS}
    finally:
        path.unlink()


def test_an_incarnation_that_goes_on_beside_its_successor(job: Job) -> None:
    job.lines.append(("trainer-0", 1, 11, "lives", None))
    assert job.faults() == {TWICE}


def test_two_processes_of_one_incarnation(job: Job) -> None:
    job.lines.append(("trainer-0", 2, 14, "lives", None))
    assert job.faults() == {TWICE}


def test_a_committed_record_that_is_lost(job: Job) -> None:
    del job.state[1]
    assert job.faults() == {LOST}


def test_a_source_that_has_not_ended(job: Job) -> None:
    job.lines.pop()
    assert LOST in job.faults()


def test_a_stored_record_that_the_channel_has_lost(job: Job) -> None:
    job.lines[2] = ("source-0", 2, 12, "opens", 1)
    assert job.faults() == {LOST}


def test_a_record_that_is_there_twice(job: Job) -> None:
    job.state.append(["source-0", 2, 4])
    assert job.faults() == {REPEATED}


def test_a_record_that_was_committed_again(job: Job) -> None:
    job.lines.append(("trainer-0", 2, 13, "commits", [["source-0", 0]]))
    assert job.faults() == {REPEATED}


@pytest.mark.parametrize("record", [["source-0", 1, 7], ["source-0", 9, 81]])
def test_a_record_that_is_not_what_was_put(job: Job, record: list[Any]) -> None:
    job.state[1:2] = [["source-0", 1, 1], record] if record[1] == 9 else [record]
    assert job.faults() == {WRONG}


def test_the_witness_is_read_while_it_is_written(tmp_path: Path) -> None:
    first, second, reader = Witness(tmp_path, "a-0", 1), Witness(tmp_path, "b-0", 2), Reader(tmp_path)
    try:
        first.note("begins")
        reader.read()
        second.note("stored", 3)
        with (tmp_path / "witness.jsonl").open("a") as file:
            file.write('["a-0", 1')
        reader.read()
    finally:
        first.close()
        second.close()
    assert [line[:2] + line[3:5] for line in reader.lines] == [["a-0", 1, "begins", None], ["b-0", 2, "stored", 3]]
