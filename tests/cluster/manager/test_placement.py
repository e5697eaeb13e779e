"""Places before processes; lost nodes; nodes that are set aside."""

from __future__ import annotations

from counterpoint.cluster.manager.events import Allocate, Allocated, Outcome
from counterpoint.cluster.manager.starting import LOSS_WINDOW_SECONDS, LOSSES, needs_of
from counterpoint.cluster.spec import JobSpec, Resources
from tests.cluster.manager.driver import Driver, managed, role


def test_a_collocation_group_is_one_bundle_and_the_sub_master_is_not_in_it() -> None:
    job = Driver(role("actor", count=2, collocate="near"), managed("critic", collocate="near"), answers=False)
    assert job.begin(0.0) == ["allocate group:near", "allocate critic-master"]
    near = job.instructions[0]
    assert isinstance(near, Allocate)
    assert near.workers == ("actor-0", "actor-1", "critic-0")
    assert job.place("group:near") == ["create actor-0", "create actor-1", "create critic-0"]


def test_a_sub_master_needs_nothing() -> None:
    spec = JobSpec(name="job", roles=(managed("rank", resources=Resources(gpu=1.0)),))
    assert needs_of(spec, "rank-0").gpu == 1.0
    assert needs_of(spec, "rank-master") == Resources()


def test_what_cannot_be_placed_now_is_tried_again_and_what_never_can_fails_the_job() -> None:
    job = Driver(role("actor"), role("learner"), answers=False)
    job.begin(0.0)
    job.place("learner-0")
    assert job.no_place("actor-0", at=1.0) == []
    assert job.deadline == 2.0
    assert job.tick() == ["allocate actor-0"]
    assert job.no_place("actor-0", at=2.0) == []
    assert job.deadline == 4.0, "the pause doubles"
    assert job.tick() == ["allocate actor-0"]
    assert job.no_place("actor-0", final=True, at=5.0) == ["release actor-0", "stop learner-0"]
    job.exit("learner-0")
    assert job.outcome == Outcome(1, "there is no place for actor-0: no room")


def test_an_answer_to_an_earlier_attempt_is_stale() -> None:
    job = Driver(role("actor"), answers=False)
    job.begin(0.0)
    job.no_place("actor-0", at=1.0)
    job.tick()
    assert job.handle(Allocated("actor-0", 1, "node", 3.0)) == []
    assert job.handle(Allocated("actor-0", 2, "node", 3.0)) == ["create actor-0"]
    assert job.handle(Allocated("actor-0", 2, "node", 3.0)) == []


def test_a_place_that_comes_too_late_is_given_back() -> None:
    job = Driver(role("actor"), answers=False)
    job.begin(0.0)
    assert job.stop(at=1.0) == ["release actor-0"]
    assert job.outcome is not None
    assert job.place("actor-0") == ["release actor-0"]


def two_nodes() -> Driver:
    """Two collocated workers on one node, a third on another; all under one scope of their own."""
    job = Driver(
        role("actor", collocate="near"), role("critic", collocate="near"), role("learner", task=True, max_restarts=0)
    )
    job.nodes = {"group:near": "one", "learner-0": "two"}
    return job.running()


def test_the_workers_of_a_lost_node_move_together_at_no_cost_to_their_budgets() -> None:
    job = two_nodes()
    job.answers = False
    assert job.lose("one", 10.0) == ["release group:near", "allocate group:near"]
    assert job["actor-0"].last_death == "was lost with node one: its keeper does not answer"
    assert job.tick() == [], "they have no place yet"
    assert job.place("group:near", "three") == ["create actor-0 again", "create critic-0 again"]
    assert job["actor-0"].deaths == 0
    assert job["learner-0"].incarnation == 1
    assert job.lose("one", 11.0) == [], "nothing is there any more"


def test_a_node_that_is_lost_before_its_workers_are_created_counts_as_well() -> None:
    job = Driver(role("actor"), answers=False)
    job.begin(0.0)
    job.place("actor-0", "one")
    assert job.lose("one", 1.0) == ["release actor-0", "allocate actor-0"]
    job.tick()
    assert job.place("actor-0", "two") == ["create actor-0 again"]


def test_a_node_that_flaps_is_set_aside_until_nothing_else_fits() -> None:
    job = two_nodes()
    for number in range(LOSSES):
        job.lose("one", 10.0 + number)
        job.tick(10.0 + number)
        job.bring_up()
    assert job.manager.state.set_aside == ["one"]
    last = [instruction for instruction in job.instructions if isinstance(instruction, Allocate)][-1]
    assert last.avoid == ("one",)
    job.answers = False
    job.nodes["group:near"] = "one"
    job.lose("one", 20.0)
    assert job.no_place("group:near", final=True, at=21.0) == []
    job.tick(22.0)
    last = [instruction for instruction in job.instructions if isinstance(instruction, Allocate)][-1]
    assert last.avoid == (), "the only node is better than none"


def test_losses_long_ago_do_not_count() -> None:
    job = two_nodes()
    for number in range(2 * LOSSES):
        at = 10.0 + number * LOSS_WINDOW_SECONDS
        job.lose("one", at)
        job.tick(at)
        job.bring_up(at)
    assert job.manager.state.set_aside == []


def test_a_job_that_stops_does_not_wait_for_what_was_lost() -> None:
    job = two_nodes()
    job.stop(at=10.0)
    assert job.lose("two", 11.0) == ["stop critic-0"]
    assert job.lose("one", 12.0) == []
    assert job.outcome == Outcome(143, "asked")


def test_a_task_whose_work_was_complete_is_not_repeated_elsewhere() -> None:
    job = two_nodes()
    job.finished("learner-0", 10.0)
    assert job.lose("two", 11.0) == ["stop critic-0"]
    job.exits("critic-0", "actor-0")
    assert job.outcome == Outcome(0, "done")
