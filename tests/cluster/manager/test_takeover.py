"""A change of masters: what was outstanding is repeated, and what is stale changes nothing."""

from __future__ import annotations

import json

import pytest

from counterpoint.cluster.manager.events import Created, ReplaceRequested, WorkerExited, WorkerReady
from counterpoint.cluster.manager.manager import TAKEOVER_SECONDS, PrimeManager
from counterpoint.cluster.spec import JobSpec, RestartScope
from tests.cluster.manager.driver import Driver, managed, role


def test_a_new_master_repeats_what_is_not_answered() -> None:
    job = Driver(managed("rank", count=2), role("actor", after=("rank",)), answers=False)
    job.begin(0.0)
    job.place("rank-0")
    assert job.new_master(2, 1.0) == [
        "allocate rank-master", "allocate rank-1", "allocate actor-0", "create rank-0"
    ]  # fmt: skip
    for name in ("rank-master", "rank-1", "actor-0"):
        job.place(name)
    for name in ("rank-0", "rank-1", "rank-master"):
        job.ready(name)
    assert job.new_master(3, 2.0) == ["create actor-0", "check rank-master"]
    job.checked("rank")
    job.ready("actor-0")
    job.started("rank-0")
    assert job.new_master(4, 3.0) == ["start rank-master", "start rank-1", "start actor-0"]
    job.bring_up()
    assert job.new_master(5, 4.0) == []
    job.silent("rank-1", at=5.0)
    assert job.new_master(6, 6.0) == ["kill rank-1"]
    job.stop(at=20.0)
    assert job.new_master(7, 21.0) == ["kill rank-1", "stop actor-0"]


def test_a_master_of_a_lower_epoch_says_nothing() -> None:
    job = Driver(role("actor"), answers=False)
    job.begin(0.0)
    assert job.new_master(2) == ["allocate actor-0"]
    assert job.new_master(2) == job.new_master(1) == []


def test_a_notice_that_is_not_answered_is_repeated() -> None:
    job = Driver(managed("rank", count=2)).running()
    job.exit("rank-1", 1)
    job.tick()
    job.bring_up()
    assert job.new_master(2) == ["tell rank-master of rank-1"]
    job.failover_done("rank-master")
    assert job.new_master(3) == []


def test_a_notice_is_not_repeated_to_one_that_is_being_killed() -> None:
    job = Driver(managed("rank", count=2)).running()
    job.exit("rank-1", 1)
    job.tick()
    job.bring_up()
    job.silent("rank-master")
    assert job.new_master(2) == ["kill rank-master"]


def test_a_place_that_is_sought_again_is_given_back_first() -> None:
    job = Driver(role("actor")).running()
    job.answers = False
    assert job.lose("node", 10.0) == ["release actor-0", "allocate actor-0"]
    assert job.new_master(2) == ["release actor-0", "allocate actor-0"]


def test_nothing_is_overdue_until_what_happened_meanwhile_is_heard() -> None:
    job = Driver(role("actor"))
    job.begin(0.0)
    assert job.deadline == 120.0
    job.new_master(2, 1000.0)
    assert job.deadline == 1000.0 + TAKEOVER_SECONDS
    assert job.ready("actor-0", 1001.0) == ["start actor-0"]


def test_a_restart_that_is_due_does_not_wait_for_the_new_master() -> None:
    job = Driver(role("actor")).running()
    job.exit("actor-0", 1, 10.0)
    job.new_master(2, 1000.0)
    assert job.tick(1000.0) == ["create actor-0 again"]


def test_after_the_end_the_places_are_given_back_again() -> None:
    job = Driver(role("actor")).running()
    job.stop()
    job.exit("actor-0")
    job.answers = False
    assert job.new_master(2) == ["release actor-0"]


def test_events_of_other_incarnations_and_of_ended_workers_change_nothing() -> None:
    job = Driver(managed("rank", count=2, task=True)).running()
    job.exit("rank-1", 1)
    job.tick()
    job.finished("rank-0")
    job.exit("rank-0")
    before = job.manager.snapshot()
    for event in (
        Created("rank-1", 1, "elsewhere", 7, 20.0),
        WorkerReady("rank-1", 1, "ipc://old", "", 20.0),
        WorkerExited("rank-1", 1, 137, "", 20.0),
        WorkerExited("rank-1", 3, 137, "", 20.0),
        WorkerExited("rank-0", 1, 0, "", 20.0),
        WorkerExited("nobody", 1, 0, "", 20.0),
        ReplaceRequested("rank-master", 1, "rank-1", 1, "slow", 20.0),
        ReplaceRequested("rank-master", 2, "rank-1", 2, "slow", 20.0),
    ):
        assert job.handle(event) == []
        assert job.manager.snapshot() == before
        assert job.manager.is_stale(event) == (event != ReplaceRequested("rank-master", 2, "rank-1", 2, "slow", 20.0))


def test_a_snapshot_is_json_and_goes_on_as_the_whole() -> None:
    job = Driver(managed("rank", count=2, restart=RestartScope.ROLE)).running()
    job.exit("rank-1", 1, 10.0)
    job.stop(at=11.0)
    fields = json.loads(json.dumps(job.manager.snapshot()))
    again = PrimeManager(job.manager.spec, fields)
    assert again.state == job.manager.state
    assert again.deadline == job.deadline
    event = WorkerExited("rank-0", 1, 143, "", 12.0)
    assert again.handle(event) == job.manager.handle(event)
    assert again.state == job.manager.state


def test_changed_members_are_given_once_and_all_of_them_to_a_new_master() -> None:
    job = Driver(managed("rank", count=2))
    assert [member.worker for member in job.manager.take_changes()] == ["rank-master", "rank-0", "rank-1"]
    job.begin(0.0)
    job.ready("rank-1")
    seen = {member.worker: (member.stage, member.address, member.incarnation) for member in job.manager.take_changes()}
    assert seen["rank-1"] == ("READY", "ipc://rank-1", 1)
    assert job.manager.take_changes() == []
    job.exit("rank-1", 1)
    (member,) = job.manager.take_changes()
    assert (member.worker, member.stage, member.address) == ("rank-1", "INIT", "")
    job.new_master(2)
    assert len(job.manager.take_changes()) == 3


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"epoch": "1"}, "epoch"),
        ({"stage": "ASLEEP"}, "ASLEEP"),
        ({"later": 1}, "other fields"),
        ({"roles": None}, "roles"),
    ],
)
def test_a_snapshot_of_another_version_is_refused(changed: dict[str, object], named: str) -> None:
    fields = Driver(role("actor")).running().manager.snapshot()
    with pytest.raises(ValueError, match=named):
        PrimeManager(JobSpec(name="job", roles=(role("actor"),)), fields | changed)


def test_a_snapshot_that_lacks_a_field_is_refused() -> None:
    fields = Driver(role("actor")).running().manager.snapshot()
    del fields["set_aside"]
    with pytest.raises(ValueError, match="other fields"):
        PrimeManager(JobSpec(name="job", roles=(role("actor"),)), fields)
