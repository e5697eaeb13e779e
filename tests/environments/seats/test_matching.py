"""Which seat goes to which episode: groups stay together, and nobody waits who could play."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.environments.seats.matching import REMEMBERED, Matcher, Pair

SEAT = 1000
"""Added to a seat's number, so that it differs from every episode's."""


def examples_by_key(pairs: list[Pair], size: int) -> list[set[int]]:
    """By key, the examples that its seats got."""
    by_key: dict[int, set[int]] = {}
    for episode, seat in pairs:
        by_key.setdefault((seat - SEAT) // size, set()).add(episode // size)
    return list(by_key.values())


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**32).map(random.Random), st.booleans())
@settings(max_examples=40)
def test_groups_of_one_size_are_paired_whole(groups: int, size: int, order: random.Random, seats_first: bool) -> None:
    """However the later side arrives, once the other waits."""
    matcher, pairs = Matcher(), list[Pair]()
    seats, episodes = list(range(groups * size)), list(range(groups * size))
    order.shuffle(episodes if seats_first else seats)
    for side in ("seats", "episodes") if seats_first else ("episodes", "seats"):
        if side == "seats":
            pairs += [pair for each in seats for pair in matcher.add_seat(SEAT + each, each // size)]
        else:
            pairs += [pair for each in episodes for pair in matcher.add_episode(each, each // size)]
    assert len(pairs) == groups * size
    assert all(len(examples) == 1 for examples in examples_by_key(pairs, size))


@given(
    st.lists(
        st.tuples(st.sampled_from(["episode", "seat", "less episode", "less seat"]), st.integers(0, 3)), max_size=60
    )
)
@settings(max_examples=100)
def test_nobody_waits_beside_a_partner_and_nobody_plays_twice(events: list[tuple[str, int]]) -> None:
    matcher = Matcher()
    episodes: dict[int, int] = {}
    seats: dict[int, int] = {}
    for number, (event, group) in enumerate(events):
        pairs: list[Pair] = []
        if event == "episode":
            episodes[number] = group
            pairs = matcher.add_episode(number, group)
        elif event == "seat":
            seats[number] = group
            pairs = matcher.add_seat(number, group)
        elif event == "less episode" and episodes:
            gone, example = episodes.popitem()
            matcher.remove_episode(gone, example)
        elif event == "less seat" and seats:
            gone, key = seats.popitem()
            matcher.remove_seat(gone, key)
        for episode, seat in pairs:
            del episodes[episode], seats[seat]
        assert not (episodes and seats)


def test_a_group_whose_partner_was_smaller_plays_with_the_next() -> None:
    matcher = Matcher()
    for episode in range(6):
        matcher.add_episode(episode, 7)
    paired = [pair for seat in range(4) for pair in matcher.add_seat(SEAT + seat, 1)]
    assert [episode for episode, _ in paired] == [0, 1, 2, 3]
    assert matcher.add_seat(SEAT + 4, 2) == [(4, SEAT + 4)]


def test_what_is_remembered_is_bounded() -> None:
    matcher = Matcher()
    for number in range(3 * REMEMBERED):
        matcher.add_episode(number, number)
        assert matcher.add_seat(number, number) == [(number, number)]
    assert len(matcher._keys) == len(matcher._examples) == len(matcher._example_of) == REMEMBERED
