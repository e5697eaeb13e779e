"""Room is shared: whatever others take, whoever has none finds some."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from counterpoint.transport.room import Room


def test_one_alone_has_half_and_two_have_a_third_each() -> None:
    room = Room(120)
    assert sum(room.take("a", 1) for _ in range(1000)) == 60
    assert sum(room.take("b", 1) for _ in range(1000)) == 30


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), max_size=200))
def test_nobody_takes_what_is_not_there_and_a_newcomer_finds_some(asked: list[tuple[int, int]]) -> None:
    room = Room(1000)
    held: dict[int, int] = dict.fromkeys(range(6), 0)
    for owner, amount in asked:
        held[owner] += amount * room.take(owner, amount)
        assert held[owner] == room.of(owner) <= 500
        assert sum(held.values()) <= 1000
    assert room.take("newcomer", 1)


def test_what_is_due_is_taken_in_any_case() -> None:
    room = Room(10)
    assert not room.take("a", 50)
    assert room.take("a", 50, is_due=True)
    assert not room.take("b", 1)
    room.give_back("a", 50)
    assert room.of("a") == 0
    assert room.take("b", 1)
