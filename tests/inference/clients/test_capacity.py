"""The cap on requests at a server: how it moves for one run, and that several, each by itself, come to equal shares."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.inference.clients.capacity import (
    DECREASE_FACTOR,
    FAST_INCREASE,
    LOWEST_CAP,
    CapacityController,
    Observation,
)

EASY = Observation(cache_use=0.3, running=40, waiting=0, preemptions=0)
FULL = Observation(cache_use=0.97, running=64, waiting=10, preemptions=0)
BETWEEN = Observation(cache_use=0.9, running=64, waiting=10, preemptions=0)
QUEUED = Observation(cache_use=0.5, running=64, waiting=100, preemptions=0)


def caps(controller: CapacityController, *seen: Observation, in_flight: int = 0) -> list[int]:
    history = []
    for observation in seen:
        controller.observe(observation, in_flight)
        history.append(controller.cap)
    return history


def test_it_begins_halfway_and_rises_to_the_ceiling_once_two_looks_agree() -> None:
    controller = CapacityController(64)
    assert caps(controller, *[EASY] * 6) == [32, 40, 48, 56, 64, 64]


@pytest.mark.parametrize("overload", [FULL, QUEUED])
def test_two_looks_that_agree_cut_it_and_one_does_not(overload: Observation) -> None:
    controller = CapacityController(64)
    assert caps(controller, overload, EASY, overload, overload) == [32, 32, 32, 24]


def test_it_creeps_up_where_the_server_is_neither_at_ease_nor_overloaded() -> None:
    assert caps(CapacityController(64), *[BETWEEN] * 4) == [32, 33, 34, 35]


def test_it_is_not_cut_again_before_the_cut_has_shown() -> None:
    controller = CapacityController(64)
    assert caps(controller, *[FULL] * 4, in_flight=30) == [32, 24, 24, 24]
    assert caps(controller, FULL, in_flight=24) == [18]


def test_preemptions_are_overload_while_they_go_on() -> None:
    controller = CapacityController(64)
    thrown_out = [Observation(0.6, 64, 0, total) for total in (7, 9, 12, 12)]
    assert caps(controller, *thrown_out) == [32, 32, 24, 24]
    assert "2 requests were preempted" in reasons(
        Observation(0.6, 64, 0, 5), Observation(0.6, 64, 0, 6), Observation(0.6, 64, 0, 8)
    )


def reasons(*seen: Observation) -> str:
    controller = CapacityController(64)
    return "; ".join(filter(None, [controller.observe(observation, 0) for observation in seen]))


def test_a_cut_says_why() -> None:
    assert reasons(FULL, FULL) == "its KV cache is 97% full"
    assert reasons(QUEUED, QUEUED) == "100 requests wait and 64 run"
    assert reasons(EASY, EASY, BETWEEN, FULL) == ""


def test_a_server_that_loads_weights_is_not_overloaded() -> None:
    paused = Observation(cache_use=0.2, running=0, waiting=300, preemptions=0)
    assert caps(CapacityController(64), *[paused] * 5) == [32] * 5


observations = st.builds(
    Observation,
    cache_use=st.floats(0, 1),
    running=st.integers(0, 500),
    waiting=st.integers(0, 500),
    preemptions=st.integers(0, 5),
)


@given(st.integers(1, 300), st.lists(st.tuples(observations, st.integers(0, 300)), max_size=40))
def test_no_history_leaves_the_bounds_or_raises_an_overloaded_server(
    ceiling: int, history: list[tuple[Observation, int]]
) -> None:
    controller = CapacityController(ceiling)
    assert min(LOWEST_CAP, ceiling) <= controller.cap <= ceiling
    for seen, in_flight in history:
        before = controller.cap
        reason = controller.observe(seen, in_flight)
        assert min(LOWEST_CAP, ceiling) <= controller.cap <= ceiling
        assert controller.cap - before <= FAST_INCREASE
        assert bool(reason) == (controller.cap < before)
        if seen.cache_use >= 0.95 or (seen.running and seen.waiting > 1.5 * seen.running):
            assert controller.cap <= before
        if controller.cap < before:
            assert (
                controller.cap >= min(int(before * DECREASE_FACTOR), before - 1) or controller.cap == controller.floor
            )
            assert in_flight <= before


class SimulatedServer:
    """Runs up to `seats` requests at once and lets the others wait; all runs have as much to ask as they may."""

    def __init__(self, seats: int) -> None:
        self.seats = seats
        self.runs: list[CapacityController] = []
        self.in_flight: list[float] = []

    def join(self, ceiling: int) -> None:
        self.runs.append(CapacityController(ceiling))
        self.in_flight.append(0)

    def look(self, order: list[int]) -> None:
        """Between two looks a fifth of what is above a cap ends; what is below is filled at once."""
        for index in order:
            cap, had = self.runs[index].cap, self.in_flight[index]
            self.in_flight[index] = cap if had <= cap else max(cap, had * 0.8)
            total = int(sum(self.in_flight))
            running = min(total, self.seats)
            self.runs[index].observe(
                Observation(running / self.seats * 0.9, running, total - running, 0), int(self.in_flight[index])
            )


def jain(shares: list[float]) -> float:
    """R. Jain, D. Chiu, W. Hawe, "A Quantitative Measure of Fairness", 1984: 1 where all are equal, 1/n where one has all."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


@pytest.mark.parametrize("seed", range(5))
def test_four_runs_come_to_equal_shares_and_a_newcomer_gets_its_own(seed: int) -> None:
    order = random.Random(seed)
    server = SimulatedServer(seats=64)
    server.join(256)
    shares: list[list[float]] = []
    for look in range(900):
        if look in (60, 61, 300):  # two more nearly at once, and one late
            server.join(256)
        # Each looks when it does, in no fixed order.
        server.look(order.sample(range(len(server.runs)), len(server.runs)))
        shares.append([float(run.cap) for run in server.runs])
    three = [sum(column) / 100 for column in zip(*shares[200:300], strict=True)]
    four = [sum(column) / 400 for column in zip(*shares[500:], strict=True)]
    assert jain(three) > 0.9
    assert jain(four) > 0.9
    assert four[3] > 0.7 * sum(four) / 4
    totals = [sum(caps) for caps in shares[500:]]
    assert min(totals) >= 64, "the server is never left with empty seats"
    assert max(totals) <= 64 * 4, "and never flooded"
