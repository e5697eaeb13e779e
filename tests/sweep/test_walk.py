"""The order of tries: as given, pass after pass over what is open, and never busy."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from sweep.walk import SHORTEST_REST, Rest, Try, Walk

HEARTBEAT = 30.0

outcomes = st.one_of(st.just("done"), st.just("failed"), st.floats(0.0, 100.0))


@settings(max_examples=40)
@given(count=st.integers(0, 5), answers=st.lists(outcomes, max_size=30), seed=st.integers(0, 9))
def test_every_open_target_is_tried_once_a_pass_in_order_and_then_no_more(
    count: int, answers: list[str | float], seed: int
) -> None:
    ids = [f"t{index}" for index in range(count)]
    walk, remaining = Walk(ids, HEARTBEAT, random.Random(seed)), list(ids)
    coming = iter(answers)
    while remaining:
        open_after: list[str] = []
        hints: list[float] = []
        for target_id in remaining:
            assert walk.next() == Try(target_id)
            match next(coming, "done"):
                case "done":
                    walk.done(target_id)
                case "failed":
                    walk.failed(target_id, RuntimeError(target_id))
                case float(seconds):
                    walk.later(target_id, seconds)
                    open_after.append(target_id)
                    hints.append(seconds)
        if open_after:
            rest = walk.next()
            assert isinstance(rest, Rest)
            longest = max(min(*hints, HEARTBEAT), HEARTBEAT * SHORTEST_REST)
            assert longest / 2 <= rest.seconds <= longest
        remaining = open_after
    assert walk.next() is None
    assert set(walk.failures) <= set(ids)
