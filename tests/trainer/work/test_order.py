"""Items are carried out in the order of their numbers, each once, and none that does not count: against a plain list."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from counterpoint.trainer.work.order import Order

LAST = 8


class OrderMachine(RuleBasedStateMachine):
    """Items arrive in any order, are replaced, committed and forgotten, while a worker does what is due."""

    def __init__(self) -> None:
        super().__init__()
        self.start(0)

    def start(self, done: int) -> None:
        self.order: Order[str] = Order(done, 0.0, committed=done, last=LAST)
        self.plain: list[str | None] = [f"done-{number}" for number in range(done + 1)] + [None] * (LAST - done)
        """By number, what is asked for now, or was carried out."""
        self.done = self.committed = done
        self.working: str | None = None
        """What is computed, whether it counts or not."""
        self.counts = False
        self.names = 0

    @rule(number=st.integers(1, LAST))
    def ask(self, number: int) -> None:
        if number <= self.done + self.counts:
            with pytest.raises(AssertionError, match=str(number)):
                self.order.ask(number, "late")
            return
        if number <= self.committed and self.plain[number] is not None:
            return  # what is committed is not replaced: a session refuses it
        self.names += 1
        self.plain[number] = f"{number}-{self.names}"
        self.order.ask(number, f"{number}-{self.names}")

    @rule(number=st.integers(1, LAST))
    def commit(self, number: int) -> None:
        self.order.commit(number)
        self.committed = max(self.committed, number)

    @rule()
    def begin_a_session(self) -> None:
        self.order.forget_uncommitted()
        self.plain[self.committed + 1 :] = [None] * (LAST - self.committed)

    @rule(refused=st.booleans())
    def do_what_is_due(self, refused: bool) -> None:
        due = self.order.next(1.0)
        if self.counts:
            assert due.item is None
            assert not due.drops
            return
        if due.drops:
            assert self.working is not None
            self.working = None
        asked = self.plain[self.done + 1] if self.done < LAST else None
        assert self.working in (None, asked), "what is no longer asked for is dropped"
        if due.item is None:
            assert asked is None or self.done + 1 > self.committed, "what counts is taken"
            return
        assert due.item == asked
        assert due.counts == (self.done + 1 <= self.committed)
        assert due.has_begun == (self.working is not None)
        self.working, self.counts = due.item, due.counts
        if refused and not due.counts:
            self.order.refuse()
            self.working = None
            assert self.order.next(1.0).item is None, "not again, until it counts"

    @precondition(lambda self: self.counts)
    @rule()
    def carry_out(self) -> None:
        self.order.end(2.0)
        self.done, self.working, self.counts = self.done + 1, None, False

    @precondition(lambda self: self.working is not None)
    @rule()
    def drop_all(self) -> None:
        assert self.order.drop() == self.working
        self.start(self.done)  # the run has left its slot

    @invariant()
    def it_says_where_it_is(self) -> None:
        order = self.order
        assert (order.done, order.newest, order.open) == (
            self.done,
            self.done + self.counts,
            self.done + 1 if self.counts else None,
        )
        following = self.done + self.counts + 1
        assert order.has_next == (following <= min(LAST, self.committed) and self.plain[following] is not None)
        assert order.is_over == (self.done == LAST)

    def teardown(self) -> None:
        """Left alone, everything is carried out, once and in order."""
        for number in range(1, LAST + 1):
            if number > self.done + self.counts and self.plain[number] is None:
                self.ask(number)
        self.commit(LAST)
        for _ in range(LAST):
            self.do_what_is_due(refused=False)
            if self.counts:
                self.carry_out()
        assert self.order.is_over
        assert self.order.waiting == {}


def test_every_item_that_counts_is_carried_out_once_and_in_order() -> None:
    run_state_machine_as_test(OrderMachine, settings=settings(max_examples=150, stateful_step_count=40))


def test_the_time_for_which_an_item_is_awaited_ends_when_it_begins() -> None:
    order: Order[str] = Order(0, 10.0, committed=0)
    order.ask(1, "one")
    assert order.next(13.0).item == "one"
    order.commit(1)
    assert order.next(17.0).has_begun
    assert order.waited == 3.0
    order.end(20.0)
    order.ask(2, "two")
    order.commit(2)
    assert order.next(25.0).counts
    assert order.waited == 5.0
