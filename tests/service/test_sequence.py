"""Requests of a model come out in the order of their numbers, each once, whatever the order of arrival and the repetitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.service.tinker.sequence import Sequence, TooEarly


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(1, n), max_size=40))))
def test_each_request_comes_out_once_and_in_order(given: tuple[int, list[int]]) -> None:
    count, arrivals = given
    sequence, found = Sequence[str](), []
    for number in [*arrivals, *reversed(range(1, count + 1))]:  # the last part of it lets every number arrive
        found += sequence.offer(number, f"request {number}", now=0.0)
        assert found == [(each, f"request {each}") for each in range(1, len(found) + 1)]
        assert sequence.knows(number)
    assert len(found) == count
    assert not sequence.offer(1, "another", now=0.0), "a repetition"


def test_the_first_request_of_a_number_counts() -> None:
    sequence = Sequence[str]()
    assert sequence.offer(2, "first", now=0.0) == []
    assert sequence.offer(2, "second", now=0.0) == []
    assert sequence.offer(1, "one", now=0.0) == [(1, "one"), (2, "first")]


def test_requests_behind_a_missing_one_are_bounded_and_end() -> None:
    sequence = Sequence[str](done=3, most_waiting=2)
    with pytest.raises(TooEarly, match="4"):
        sequence.offer(6, "far", now=0.0)
    with pytest.raises(ValueError, match="count from 1"):
        sequence.offer(0, "none", now=0.0)
    sequence.offer(5, "near", now=10.0)
    assert sequence.overdue(before=10.0) == []
    assert sequence.overdue(before=11.0) == [5]
    assert not sequence.knows(5)
    assert sequence.offer(4, "late", now=12.0) == [(4, "late")]
