"""How long a full batch waits for stragglers."""

from __future__ import annotations

import asyncio

import pytest

from counterpoint.orchestrator.step.patience import BatchPatience


class Played:
    """A patience on a clock that is set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ended: list[tuple[int, float]] = []
        self.calls: list[float] = []
        self.patience = BatchPatience(lambda *end: self.ended.append(end), lambda: self.now, self.call_later)

    def call_later(self, seconds: float, call: object) -> Played:
        self.calls.append(seconds)
        self.call = call
        return self

    def cancel(self) -> None:
        self.call = None

    def pass_(self) -> None:
        """The time that was set last passes."""
        self.now += self.calls[-1]
        assert callable(self.call)
        self.call()


def test_a_wait_is_so_many_steps_of_those_before_without_their_waits() -> None:
    played = Played()
    for step, seconds in ((1, 2.0), (2, 4.0)):
        played.now += seconds
        played.patience.shipped(step)
        played.patience.loaded(step)
    played.now = 9.0
    played.patience.wait(3, 5)
    assert played.calls == [15.0]
    played.now += 1000.0
    played.patience.shipped(3)
    assert played.call is None, "the wait of step 3 ended as its batch shipped"
    played.now += 3.0
    played.patience.wait(4, 5)
    played.pass_()
    assert played.ended == [(4, 15.0)]


def test_a_step_is_as_long_as_the_trainers_where_batches_are_full_at_once() -> None:
    played = Played()
    played.now = 600.0
    played.patience.loaded(0)  # the start of the servers is no step
    played.patience.shipped(1)
    played.patience.wait(2, 3)
    assert played.calls == [0.0]
    played.now += 10.0
    played.pass_()
    assert not played.ended, "the trainer has been at its first step for ten seconds"
    assert played.calls[1:] == [20.0]
    played.patience.loaded(1)
    played.now += 10.0
    assert played.patience.trainer_seconds == 10.0
    played.pass_()
    assert played.ended == [(2, 30.0)]


def test_a_trainer_that_waits_for_its_batch_takes_no_longer() -> None:
    played = Played()
    played.patience.loaded(0)
    played.now = 5.0
    played.patience.shipped(1)
    played.now = 7.0
    played.patience.loaded(1)
    played.now = 107.0
    played.patience.shipped(2)
    played.patience.shipped(3)
    played.now = 111.0
    played.patience.loaded(3)
    assert played.patience.trainer_seconds == pytest.approx(2.0)


async def test_a_wait_ends_on_the_loop() -> None:
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    patience = BatchPatience(lambda step, seconds: ended.set_result(step))
    patience.loaded(0)
    patience.wait(1, 1)
    assert not ended.done()
    assert await ended == 1
