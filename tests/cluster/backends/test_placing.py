"""Where a bundle goes: on one node, with the most room left, and never where there is none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.cluster.backends.base import Bundle, Node
from counterpoint.cluster.backends.capacity import choose, total_of
from counterpoint.cluster.errors import BackendError, CapacityError
from counterpoint.cluster.spec import Resources


def node(name: str, **resources: float) -> Node:
    return Node(name, True, resources)


def bundle(*cpus: float) -> Bundle:
    return Bundle("b", {f"w-{rank}": Resources(cpu=cpu) for rank, cpu in enumerate(cpus)})


def test_the_node_with_the_most_room_is_chosen() -> None:
    nodes = [node("one", cpu=4), node("two", cpu=4)]
    assert choose(bundle(1), nodes, {"one": [{"cpu": 2}]}, ()) == "two"
    assert choose(bundle(), nodes, {"one": [{}]}, ()) == "two", "of equal ones that with fewer bundles"


def test_a_bundle_is_placed_whole_or_not_at_all() -> None:
    nodes = [node("one", cpu=2), node("two", cpu=2)]
    with pytest.raises(CapacityError, match="cpu: wanted 3, present 2, missing 1"):
        choose(bundle(1.5, 1.5), nodes, {}, ())
    with pytest.raises(BackendError, match="no place now: cpu: wanted 2, free at most 1"):
        choose(bundle(1, 1), nodes, {"one": [{"cpu": 1}], "two": [{"cpu": 1.5}]}, ())


def test_a_node_that_is_set_aside_or_dead_is_not_chosen() -> None:
    nodes = [node("one", cpu=4), node("two", cpu=2), Node("three", False, {"cpu": 64})]
    assert choose(bundle(1), nodes, {}, ["one"]) == "two"
    with pytest.raises(BackendError, match="set aside"):
        choose(bundle(1), nodes, {}, ["one", "two"])


@settings(max_examples=50)
@given(st.lists(st.integers(1, 4), max_size=20), st.lists(st.integers(1, 8), min_size=1, max_size=4))
def test_no_node_ever_holds_more_than_it_has(wishes: list[int], sizes: list[int]) -> None:
    nodes = [node(f"n{index}", cpu=size) for index, size in enumerate(sizes)]
    taken: dict[str, list[dict[str, float]]] = {one.name: [] for one in nodes}
    for wish in wishes:
        try:
            name = choose(bundle(wish), nodes, taken, ())
        except (BackendError, CapacityError):
            free = [size - sum(t["cpu"] for t in taken[f"n{index}"]) for index, size in enumerate(sizes)]
            assert max(free) < wish
            continue
        taken[name].append(total_of(bundle(wish).needs.values()))
    for one in nodes:
        assert sum(total["cpu"] for total in taken[one.name]) <= one.resources["cpu"]
