"""What a job needs against what its nodes have: what can never fit is refused, with the shortfall."""

from __future__ import annotations

import pytest

from counterpoint.cluster.backends.base import Bundle, Node
from counterpoint.cluster.backends.capacity import require_capacity, total_of
from counterpoint.cluster.errors import CapacityError
from counterpoint.cluster.spec import Resources


def node(name: str, alive: bool = True, **resources: float) -> Node:
    return Node(name, alive, resources)


def bundle(name: str, *needs: Resources) -> Bundle:
    return Bundle(name, {f"{name}-{rank}": need for rank, need in enumerate(needs)})


def refusal(bundles: list[Bundle], nodes: list[Node]) -> str:
    with pytest.raises(CapacityError) as caught:
        require_capacity(bundles, nodes)
    return str(caught.value)


def test_what_fits_is_accepted() -> None:
    tenth = Resources(cpu=0.1)
    require_capacity([bundle("a", *[tenth] * 10), bundle("b")], [node("one", cpu=1)])
    require_capacity([bundle("a", Resources(custom={"disk": 1}))], [node("one"), node("two", disk=1)])


def test_every_shortfall_of_the_whole_is_told() -> None:
    needs = [bundle(f"r{rank}", Resources(cpu=2, gpu=1, memory_bytes=10**9)) for rank in range(4)]
    assert refusal(
        needs, [node("one", cpu=4, memory_bytes=64e9), node("two", cpu=2), node("three", False, cpu=64)]
    ) == (
        "the job does not fit: cpu: wanted 8, present 6, missing 2; gpu: wanted 4, present 0, missing 4, on 2 nodes in total; "
        "ask for less, or add nodes"
    )


def test_a_bundle_that_no_node_holds_is_told_with_the_nearest_node() -> None:
    together = bundle("learner", Resources(cpu=2), Resources(cpu=1.5, custom={"disk": 1}))
    message = refusal([together], [node("one", cpu=3), node("two", cpu=2, disk=1)])
    assert message == (
        "bundle learner (learner-0, learner-1) fits on no node: cpu: wanted 3.5, present 2, missing 1.5, on the nearest node "
        "two; all its workers are placed on one node"
    )


def test_without_a_living_node_nothing_fits() -> None:
    assert "no node is alive" in refusal([bundle("a")], [node("one", False, cpu=1)])


def test_needs_are_added_up_by_name() -> None:
    assert total_of([Resources(cpu=1, custom={"disk": 1}), Resources(cpu=0.5, memory_bytes=3)]) == {
        "cpu": 1.5,
        "memory_bytes": 3,
        "disk": 1,
    }
