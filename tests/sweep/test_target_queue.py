"""The order of tries: as given, pass after pass over what is open, and never busy nor idle for long."""

from __future__ import annotations

import heapq
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.sweep.target_queue import FIRST_WAIT_SECONDS, Backoff, TargetQueue, Try, WaitSeconds

HEARTBEAT = 30.0

outcomes = st.one_of(st.just("done"), st.just("failed"), st.floats(0.0, 100.0))


@settings(max_examples=40)
@given(count=st.integers(0, 5), answers=st.lists(outcomes, max_size=30), seed=st.integers(0, 9))
def test_every_open_target_is_tried_once_a_pass_in_order_and_then_no_more(
    count: int, answers: list[str | float], seed: int
) -> None:
    ids = [f"t{index}" for index in range(count)]
    queue, remaining = TargetQueue(ids, HEARTBEAT, random.Random(seed)), list(ids)
    coming = iter(answers)
    while remaining:
        open_after: list[str] = []
        hints: list[float] = []
        for target_id in remaining:
            assert queue.next() == Try(target_id)
            match next(coming, "done"):
                case "done":
                    queue.done(target_id)
                case "failed":
                    queue.failed(target_id, RuntimeError(target_id))
                case float(seconds):
                    queue.later(target_id, seconds)
                    open_after.append(target_id)
                    hints.append(seconds)
        if open_after:
            rest = queue.next()
            assert isinstance(rest, WaitSeconds)
            shortest = FIRST_WAIT_SECONDS * len(open_after)
            assert shortest / 2 <= rest.seconds <= min(max(*hints, shortest), HEARTBEAT)
        remaining = open_after
    assert queue.next() is None
    assert set(queue.failures) <= set(ids)


@given(ends_at=st.floats(0.0, 3600.0), targets=st.integers(1, 50), seed=st.integers(0, 9))
def test_what_a_peer_ends_is_noticed_soon(ends_at: float, targets: int, seed: int) -> None:
    """Within as much time again as it was waited for, and within a heartbeat."""
    backoff, now = Backoff(HEARTBEAT, random.Random(seed)), 0.0
    while now < ends_at:
        now += backoff.next_pause(targets, 90.0)
    first = FIRST_WAIT_SECONDS * targets
    assert now - ends_at <= min(first + 2 * ends_at, HEARTBEAT)


def test_waiting_for_long_costs_a_look_a_heartbeat_and_a_few() -> None:
    backoff, looks, now = Backoff(HEARTBEAT, random.Random(0)), 0, 0.0
    while now < 3600.0:
        now += backoff.next_pause(1, 90.0)
        looks += 1
    assert looks <= 2 * 3600 / HEARTBEAT + 10


def test_five_workers_with_two_short_targets_are_done_at_once() -> None:
    """By a clock of their own: whoever is due next goes next."""
    duration = 0.02
    started: dict[str, float] = {}
    queues = [TargetQueue(["a", "b"], HEARTBEAT, random.Random(seed)) for seed in range(5)]
    due = [(0.0, index) for index in range(len(queues))]
    ended: list[float] = []
    while due:
        now, index = heapq.heappop(due)
        match queues[index].next():
            case None:
                ended.append(now)
            case WaitSeconds(seconds):
                heapq.heappush(due, (now + seconds, index))
            case Try(target_id):
                if target_id not in started:
                    started[target_id] = now
                    now += duration
                    queues[index].done(target_id)
                elif now >= started[target_id] + duration:
                    queues[index].done(target_id)
                else:
                    queues[index].later(target_id, 90.0)
                heapq.heappush(due, (now, index))
    assert max(ended) < 1.0
