"""Which node a check of pairs blames, without a node."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.cluster.elastic.pairs import MOST_ROUNDS, PairCheck, stragglers


def names(count: int) -> list[str]:
    return [f"node{index}" for index in range(count)]


def run(check: PairCheck, bad: set[str], slow: frozenset[str] = frozenset()) -> list[list[tuple[str, str]]]:
    """The rounds until the check is complete: a pair passes if both nodes are good, ten times later if one is slow."""
    rounds = []
    while pairs := check.next_round():
        rounds.append(pairs)
        for pair in pairs:
            check.record(pair, None if bad & set(pair) else 10.0 if slow & set(pair) else 1.0)
    return rounds


@given(st.integers(0, 12), st.data())
@settings(max_examples=150)
def test_pairs_are_disjoint_and_new_and_a_good_node_is_never_blamed(count: int, data: st.DataObject) -> None:
    nodes = names(count)
    bad = {node for node in nodes if data.draw(st.booleans())}
    check = PairCheck(nodes)
    met: set[frozenset[str]] = set()
    for pairs in run(check, bad):
        involved = [node for pair in pairs for node in pair]
        assert len(set(involved)) == len(involved)
        assert not met & {frozenset(pair) for pair in pairs}
        met |= {frozenset(pair) for pair in pairs}
    assert check.bad <= bad
    assert not check.good & bad
    assert check.bad | check.good | check.suspects >= set(nodes) or count == 1


@given(st.integers(2, 12), st.data())
@settings(max_examples=150)
def test_every_bad_node_is_found_where_two_good_ones_exist(count: int, data: st.DataObject) -> None:
    nodes = names(count)
    good = data.draw(st.sets(st.sampled_from(nodes), min_size=2))
    check = PairCheck(nodes, most_rounds=count**2)
    run(check, set(nodes) - good)
    assert (check.bad, check.good, check.suspects) == (set(nodes) - good, good, set())


@given(st.integers(3, 40), st.data())
@settings(max_examples=100)
def test_up_to_a_quarter_of_bad_nodes_is_found_within_the_rounds_allowed(count: int, data: st.DataObject) -> None:
    nodes = names(count)
    bad = data.draw(st.sets(st.sampled_from(nodes), max_size=max(1, count // 4)))
    check = PairCheck(nodes)
    assert len(run(check, bad)) <= MOST_ROUNDS
    assert check.bad == bad


def test_few_nodes() -> None:
    assert PairCheck().next_round() == []
    assert PairCheck(["a"]).next_round() == []
    two = PairCheck(["a", "b"])
    assert run(two, {"a"}) == [[("a", "b")]]
    assert (two.bad, two.suspects) == (set(), {"a", "b"})
    three = PairCheck(["a", "b", "c"])
    assert run(three, {"b"}) == [[("a", "b")], [("a", "c")]]
    assert three.bad == {"b"}
    assert len(run(PairCheck(["a", "b", "c"]), set())) == 3


def test_who_failed_only_with_a_node_that_left_is_no_suspect() -> None:
    check = PairCheck(["a", "b"])
    check.record(("a", "b"), None)
    check.leave("b")
    assert check.suspects == set()


@given(st.integers(3, 12), st.data())
@settings(max_examples=60)
def test_a_slow_node_is_told_from_its_partners(count: int, data: st.DataObject) -> None:
    nodes = names(count)
    slow = data.draw(st.sampled_from(nodes))
    check = PairCheck(nodes)
    run(check, set(), frozenset({slow}))
    rates = {node: 1 / seconds for node, seconds in check.seconds.items()}
    assert list(stragglers(rates, 0.5)) == [slow]


@pytest.mark.parametrize(
    ("rates", "found"),
    [
        ({}, {}),
        ({"a": 1.0}, {}),
        ({"a": 1.0, "b": 1.0, "c": 0.4}, {"c": 0.4}),
        ({"a": 1.0, "b": 1.0, "c": 0.6}, {}),
    ],
)
def test_a_straggler_is_far_below_the_median(rates: dict[str, float], found: dict[str, float]) -> None:
    assert stragglers(rates, 0.5) == found
