"""ElasticMaster and ElasticWorkers talk to each other in threads; the checks and ranks are stand-ins, and once real."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from counterpoint.cluster.calls.remote import methods_of
from counterpoint.cluster.elastic.elastic_worker import ElasticWorker
from counterpoint.cluster.elastic.rounds import ElasticTrainingFailed, RoundsStage
from counterpoint.cluster.worker import Stage
from counterpoint.transport.files.atomic import write_atomically
from tests.cluster.elastic.troupe import Life, Troupe, mastered, troupe, until
from tests.support.fake_ranks import FakeRanks
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


def until_training(life: Life, number: int) -> None:
    rounds = life.worker.rounds
    until(
        life, lambda: (rounds.stage, rounds.round) == (RoundsStage.TRAINING, number), f"the training of round {number}"
    )


def until_over(life: Life, job: Troupe) -> None:
    life.join()
    assert life.error is None
    assert {member.stage for member in job.members()} == {Stage.FINISH}


def test_a_bad_node_alone_is_replaced_before_the_training(ranks: list[FakeRanks], tmp_path: Path) -> None:
    (tmp_path / "bad-trainer-1.1").touch()
    with troupe(tmp_path, 3) as job, mastered(job) as master:
        assert [*job.replaced] == [("trainer-1", 1)]
        assert "no route" in job.replaced["trainer-1", 1]
        until_training(master, 1)
        assert [each.has_store for each in ranks].count(True) == 1
        assert len({(each.order.run_id, each.order.port) for each in ranks}) == 1
        assert "TRAINING, round 1, 3 workers" in master.worker.status()
        for each in ranks:
            each.succeed()
        until_over(master, job)


def test_a_script_that_fails_again_finally_stops_the_job(ranks: list[FakeRanks], tmp_path: Path) -> None:
    with troupe(tmp_path, 2, check=False, max_workers=2, max_restarts=0) as job, mastered(job) as master:
        until_training(master, 1)
        ranks[-1].fail("rank 1 ended with exit code 3")
        master.join()
        assert isinstance(master.error, ElasticTrainingFailed)
        assert "1 rounds failed in a row" in job.stopped_for
        assert "rank 1 ended with exit code 3" in job.stopped_for
        assert all(each.code is not None for each in ranks)


def test_a_dead_worker_a_newcomer_and_another_master(ranks: list[FakeRanks], tmp_path: Path) -> None:
    with troupe(tmp_path, 2, check=False, min_workers=2, max_workers=3) as job:
        with mastered(job) as first:
            until_training(first, 1)
            (other,) = (each for each in ranks if not each.has_store)  # the first has it
            job.end(0)
            wait_until(lambda: other.code == 143, "the end of the other worker's ranks")
            job.begin(0)
            until_training(first, 2)
            job.begin(2)
            until_training(first, 3)
        assert [each.order.nodes for each in ranks] == [2, 2, 2, 2, 3, 3, 3]
        with mastered(job, 2) as second:
            until_training(second, 3)
            assert len(ranks) == 7
            for each in ranks[-3:]:
                each.succeed()
            until_over(second, job)
        with mastered(job, 3) as third:
            until_over(third, job)
        assert not job.replaced


@pytest.mark.parametrize("dry_run", [False, True])
def test_progress_scales_the_role_and_a_dry_run_only_says_so(
    ranks: list[FakeRanks], tmp_path: Path, dry_run: bool
) -> None:
    scaling = {"policy": "throughput", "target": 1e9, "window_seconds": 0.5, "dry_run": dry_run}
    config = {"check": False, "min_workers": 2, "max_workers": 4, "scaling": scaling}
    with troupe(tmp_path, 2, **config) as job, mastered(job) as master:
        until_training(master, 1)
        order, done = ranks[0].order, 0.0
        meeting = {"round": 1, "members": ["trainer-0", "trainer-1"], "host": order.host, "port": order.port}
        assert master.worker.rendezvous() == meeting

        def work() -> bool:
            nonlocal done
            done += 1.0
            for each in ranks:
                written = json.dumps({"done": done, "idle_seconds": 0.0}).encode()
                write_atomically(Path(each.order.directory) / "progress-0.json", written, durable=False)
            return "2 -> 4 workers" in master.worker.status()

        until(master, work, "a decision")
        assert ("(dry run)" in master.worker.status()) is dry_run
        assert set(job.scaled) == (set() if dry_run else {4})
        for each in ranks:
            each.succeed()
        until_over(master, job)
        assert master.worker.rendezvous()["members"] == []


SCRIPT = """
import json, os, sys
name = os.path.join(sys.argv[1], "rank" + os.environ["RANK"])
open(name, "w").write(json.dumps([os.environ["TORCHELASTIC_RUN_ID"], os.environ["WORLD_SIZE"]]))
"""


def test_real_ranks_of_two_workers_meet_and_succeed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    config = {"module": "", "script": str(script), "arguments": [str(tmp_path)], "local_ranks": 2}
    with troupe(tmp_path, 2, check=False, max_workers=2, **config) as job, mastered(job) as master:
        until_over(master, job)
    seen = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("rank*")}
    assert seen == {f"rank{rank}": ["job-trainer-1", "4"] for rank in range(4)}
