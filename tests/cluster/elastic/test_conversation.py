"""ElasticMaster and ElasticWorkers talk to each other in threads; the checks and ranks are stand-ins, and once real."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from counterpoint.cluster.calls.remote import methods_of
from counterpoint.cluster.elastic.elastic_master import ElasticMaster
from counterpoint.cluster.elastic.elastic_worker import ElasticWorker
from counterpoint.cluster.elastic.rounds import ElasticTrainingFailed, RoundsStage
from counterpoint.cluster.worker import Stage
from counterpoint.transport.files.atomic import write_atomically
from tests.cluster.elastic.troupe import FakeRanks, Life, Troupe, mastered, troupe
from tests.support.polling import wait_until

pytestmark = pytest.mark.slow


def test_no_plain_method_of_a_subclass_can_hold_up_the_rounds() -> None:
    """Plain methods share one thread; a subclass's may wait for the very round that is to begin."""
    assert {name for name, method in methods_of(ElasticWorker).items() if not method.is_async} == set()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeRanks]]:
    """Every start of a worker's ranks, in order."""
    monkeypatch.setattr("counterpoint.cluster.elastic.elastic_worker.RanksProcess", FakeRanks)
    FakeRanks.started.clear()
    yield FakeRanks.started
    FakeRanks.started.clear()


def master_of(life: Life) -> ElasticMaster:
    assert isinstance(life.worker, ElasticMaster)
    return life.worker


def until_training(life: Life, number: int) -> None:
    rounds = master_of(life).rounds
    wait_until(
        lambda: (rounds.stage, rounds.round) == (RoundsStage.TRAINING, number) or life.error is not None,
        f"the training of round {number}",
        details=lambda: f"{master_of(life).status()} {life.error!r}",
    )


def until_over(life: Life, job: Troupe) -> None:
    assert life.thread is not None
    life.thread.join(120)
    assert not life.thread.is_alive()
    if life.error is None:
        assert {member.stage for member in job.members()} == {Stage.FINISH}


def test_a_bad_node_alone_is_replaced_before_the_training(ranks: list[FakeRanks], tmp_path: Path) -> None:
    (tmp_path / "bad-trainer-1").touch()
    with troupe(tmp_path, 3) as job:
        job.on_replace = (tmp_path / "bad-trainer-1").unlink
        with mastered(job) as master:
            until_training(master, 1)
            assert [(name, incarnation) for name, incarnation, _ in job.replaced] == [("trainer-1", 1)]
            assert "no route" in job.replaced[0][2]
            assert len(ranks) == 3
            assert [each.has_store for each in ranks].count(True) == 1
            assert len({(each.order.run_id, each.order.port) for each in ranks}) == 1
            assert "TRAINING, round 1, 3 workers" in master.worker.status()
            for each in ranks:
                each.succeed()
            until_over(master, job)
            assert master.error is None


def test_a_failing_script_runs_again_and_finally_stops_the_job(ranks: list[FakeRanks], tmp_path: Path) -> None:
    with troupe(tmp_path, 2, check=False, max_workers=2, max_restarts=1) as job, mastered(job) as master:
        for number in (1, 2):
            until_training(master, number)
            ranks[-1].fail("rank 1 ended with exit code 3")
        until_over(master, job)
        assert isinstance(master.error, ElasticTrainingFailed)
        assert "2 rounds failed in a row" in job.stopped_for
        assert "rank 1 ended with exit code 3" in job.stopped_for
        assert len(ranks) == 4
        assert all(each.code is not None for each in ranks)


def test_a_dead_worker_comes_again_and_a_newcomer_joins(ranks: list[FakeRanks], tmp_path: Path) -> None:
    with troupe(tmp_path, 2, check=False, min_workers=2, max_workers=3) as job, mastered(job) as master:
        until_training(master, 1)
        (other,) = (each for each in ranks if not each.has_store)  # the first has it; either may start first
        job.end(0)
        wait_until(lambda: other.code == 143, "the end of the other worker's ranks")
        job.begin(0)
        until_training(master, 2)
        assert [str(member) for member in master_of(master).rounds.members] == [
            "trainer-0 (incarnation 2)",
            "trainer-1 (incarnation 1)",
        ]
        job.begin(2)
        until_training(master, 3)
        assert [each.order.nodes for each in ranks] == [2, 2, 2, 2, 3, 3, 3]
        for each in ranks[-3:]:
            each.succeed()
        until_over(master, job)
        assert master.error is None
        assert not job.replaced


def test_a_new_master_takes_over_the_round_and_the_end(ranks: list[FakeRanks], tmp_path: Path) -> None:
    with troupe(tmp_path, 2, check=False, max_workers=2) as job:
        with mastered(job) as first:
            until_training(first, 1)
        with mastered(job, 2) as second:
            until_training(second, 1)
            assert len(ranks) == 2
            for each in ranks:
                each.succeed()
            until_over(second, job)
            assert second.error is None
        with mastered(job, 3) as third:
            until_over(third, job)
            assert third.error is None


SCRIPT = """
import json, os, sys
name = os.path.join(sys.argv[1], "rank" + os.environ["RANK"])
open(name, "w").write(json.dumps([os.environ["TORCHELASTIC_RUN_ID"], os.environ["WORLD_SIZE"]]))
"""


@pytest.mark.parametrize("dry_run", [False, True])
def test_progress_scales_the_role_and_a_dry_run_only_says_so(
    ranks: list[FakeRanks], tmp_path: Path, dry_run: bool
) -> None:
    scaling = {"policy": "throughput", "target": 1e9, "window_seconds": 0.5, "dry_run": dry_run}
    with (
        troupe(tmp_path, 2, check=False, min_workers=2, max_workers=4, scaling=scaling) as job,
        mastered(job) as master,
    ):
        until_training(master, 1)
        meeting = master_of(master).rendezvous()
        assert (meeting["round"], meeting["members"]) == (1, ["trainer-0", "trainer-1"])
        assert (meeting["host"], meeting["port"]) == (ranks[0].order.host, ranks[0].order.port)
        done = 0.0

        def work() -> bool:
            nonlocal done
            done += 1.0
            for each in ranks:
                written = json.dumps({"done": done, "idle_seconds": 0.0}).encode()
                write_atomically(Path(each.order.directory) / "progress-0.json", written, durable=False)
            return "2 -> 4 workers" in master.worker.status()

        wait_until(work, "a decision", details=master.worker.status)
        assert ("(dry run)" in master.worker.status()) is dry_run
        assert set(job.scaled) == (set() if dry_run else {4})
        for each in ranks:
            each.succeed()
        until_over(master, job)
        assert master_of(master).rendezvous()["members"] == []


def test_real_ranks_of_two_workers_meet_and_succeed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    config: dict[str, Any] = {"module": "", "script": str(script), "arguments": [str(tmp_path)], "local_ranks": 2}
    with troupe(tmp_path, 2, check=False, max_workers=2, **config) as job, mastered(job) as master:
        until_over(master, job)
        assert master.error is None
    seen = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("rank*")}
    assert seen == {f"rank{rank}": ["job-trainer-1", "4"] for rank in range(4)}
