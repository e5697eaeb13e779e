"""A role gets more workers or fewer."""

from __future__ import annotations

from counterpoint.cluster.manager.events import Outcome
from tests.cluster.manager.driver import Driver, managed, role


def elastic(**options: object) -> Driver:
    return Driver(managed("rank", count=2, min_count=1, max_count=4, **options)).running()


def test_new_ranks_are_created_checked_and_started() -> None:
    job = elastic()
    assert job.scale("rank", 4) == ["create rank-2", "create rank-3"]
    assert job.ready("rank-3") == []
    assert job.ready("rank-2") == ["tell rank-master of rank-2 rank-3", "check rank-master"]
    assert job.checked("rank") == ["start rank-2", "start rank-3"]


def test_the_highest_ranks_are_stopped_and_the_sub_master_is_told() -> None:
    job = elastic()
    job.answers = False
    assert job.scale("rank", 1, 10.0) == ["stop rank-1"]
    assert job.exit("rank-1", 143) == ["release rank-1", "tell rank-master of rank-1", "check rank-master"]
    assert job["rank-1"].phase.value == "removed"
    assert job.checked("rank") == []
    assert job.deadline is None


def test_a_count_beyond_the_limits_changes_nothing() -> None:
    job = elastic()
    for count in (0, 5, 2):
        assert job.scale("rank", count) == []
    assert job.scale("other", 2) == []


def test_a_rank_that_is_wanted_again_while_it_ends_is_created_again() -> None:
    job = elastic()
    job.scale("rank", 1, 10.0)
    assert job.scale("rank", 2, 10.5) == []
    job.exit("rank-1", 143, 11.0)
    assert job.tick() == ["create rank-1 again"]


def test_a_rank_that_is_not_wanted_any_more_is_not_created_again() -> None:
    job = elastic()
    job.exit("rank-1", 1, 10.0)
    job.scale("rank", 1, 10.5)
    assert job["rank-1"].phase.value == "removed"
    job = elastic()
    job.silent("rank-1", at=10.0)
    assert job.scale("rank", 1, 10.5) == []
    job.exit("rank-1", 137)
    assert job["rank-1"].phase.value == "removed"


def test_tasks_that_were_taken_out_are_not_awaited() -> None:
    job = elastic(task=True)
    job.scale("rank", 1)
    job.exit("rank-1", 143)
    job.finished("rank-0")
    job.exit("rank-0")
    job.exit("rank-master")
    assert job.outcome is not None
    assert job.outcome.code == 0


def test_a_collocated_role_grows_within_the_place_that_was_kept_for_it() -> None:
    job = Driver(role("rank", count=1, max_count=2, collocate="near"), answers=False)
    job.begin(0.0)
    job.place("group:near")
    assert job.scale("rank", 2) == ["create rank-1"]


def test_a_role_that_cannot_grow_goes_on_as_it_was() -> None:
    job = elastic()
    job.answers = False
    assert job.scale("rank", 3) == ["allocate rank-2"]
    assert job.no_place("rank-2", final=True) == [
        "release rank-2", "tell rank-master of rank-2", "check rank-master"
    ]  # fmt: skip
    assert job["rank-2"].phase.value == "removed"
    assert job.manager.state.roles["rank"].wanted == 2


def test_the_highest_rank_leaves_its_place_to_one_that_has_none_any_more() -> None:
    job = Driver(managed("rank", count=2, min_count=1, max_count=4))
    job.nodes = {"rank-0": "one", "rank-1": "two", "rank-master": "two"}
    job.running()
    job.answers = False
    assert job.lose("one", 10.0) == ["release rank-0", "allocate rank-0"]
    assert job.no_place("rank-0", final=True, at=11.0) == ["stop rank-1"]
    job.tick(12.0)
    assert job.no_place("rank-0", final=True, at=12.0) == [], "one is leaving"
    assert job.exit("rank-1", 143, 13.0) == ["release rank-1"]
    assert "allocate rank-0" in job.tick()
    assert job.place("rank-0", "two") == ["create rank-0 again"]
    assert job.manager.state.roles["rank"].wanted == 1


def test_a_role_that_needs_all_its_workers_fails_the_job_for_want_of_a_place() -> None:
    job = elastic()
    job.answers = False
    job.scale("rank", 1)
    job.exit("rank-1", 143)
    job.lose("node", 10.0)
    job.no_place("rank-0", final=True, at=11.0)
    assert job.outcome == Outcome(1, "there is no place for rank-0: no room")
