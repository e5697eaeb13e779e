"""A sink's follower reads each step once, across a resume that writes the files anew, and across its own restarts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.job.tracking.follow import JobFollower, SinkState
from counterpoint.transport.files.json_lines import lines_from_end, replace_end
from tests.job.tracking.jobs import Job


class Sent:
    """A sink that keeps the steps it was given, and its follower, which may be started again."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.steps: list[int] = []
        self.start()

    def start(self) -> None:
        state = SinkState(self.job.directory / "sink.json")
        self.follower = JobFollower(self.job.directory, state, lambda run_id, saved: max(self.steps, default=0))

    def read(self, over: bool = False) -> None:
        while self.follower.read():
            pass
        for run in self.follower.runs.values():
            self.steps += [row.step for row in run.feed.rows(over)]
        self.follower.save()


def resume(job: Job, step: int) -> None:
    """Does as `orchestrator.metrics.repair`, in place: what comes after the step is removed."""
    path = job.directory / "run_a" / "metrics.jsonl"
    start = 0
    for start, raw, line in lines_from_end(path):
        if line is not None and line["step"] <= step:
            start += len(raw)
            break
    replace_end(path, start, b"")


@pytest.mark.parametrize("restarted", [False, True])
def test_no_step_is_lost_when_a_resumed_file_has_grown_past_where_it_was_read(tmp_path: Path, restarted: bool) -> None:
    job = Job(tmp_path)
    for step in range(1, 11):
        job.ship(step, reward=1 / 3)
        job.train(step)
    sent = Sent(job)
    sent.read()
    resume(job, 7)
    for step in range(8, 21):
        job.ship(step, reward=0.5)  # shorter lines than before: the old place is within a later one
    assert sent.steps == [*range(1, 11)]
    if restarted:
        sent.start()
    sent.read(over=True)
    assert sent.steps == [*range(1, 21)]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_each_step_is_sent_once_whatever_is_resumed_and_restarted(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    job = Job(tmp_path_factory.mktemp("job"))
    sent, newest = Sent(job), 0
    for action in data.draw(st.lists(st.sampled_from(["ship", "resume", "read", "restart"]), max_size=20)):
        match action:
            case "ship":
                for _ in range(data.draw(st.integers(1, 6))):
                    newest += 1
                    job.ship(newest, data.draw(st.sampled_from([0.5, 1 / 3])))
                    job.train(newest)
            case "resume" if newest:
                newest = data.draw(st.integers(0, newest))
                resume(job, newest)
            case "read":
                sent.read()
            case "restart":
                sent.start()
    sent.read(over=True)
    assert sent.steps == sorted(set(sent.steps))
    assert set(range(1, newest + 1)) <= set(sent.steps)
