"""The protocol under every fault at once: several workers' exchanges, a request at a time, over a store that fails, delays, loses
answers, delivers late and tears; with clocks that run unevenly, workers that are killed, and workers that are stopped and go on.

A *live* owner is one that claims, by what it knows and its own clock, to have the target: a body is running there. There is
never more than one, except for an owner that is stopped (SIGSTOP): it knows nothing, and what it writes must change nothing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from counterpoint.sweep.lease import Terms, failed, interrupted, succeeded
from counterpoint.sweep.protocol import (
    Clocks,
    Exchange,
    LeaseLost,
    Observer,
    OwnedLease,
    Read,
    Request,
    WaitRequest,
    Write,
)
from counterpoint.sweep.record import Record, RecordState
from counterpoint.sweep.store import Conflict, Store, StoreError
from counterpoint.sweep.stores.local import LocalStore
from counterpoint.sweep.stores.memory import MemoryStore

TERMS = Terms(heartbeat=10.0, lease=30.0, max_attempts=None)
FEW = Terms(heartbeat=10.0, lease=30.0, max_attempts=3)
KEY = "target"
DRIFT = 0.01
WORKERS = 3

HOW_IT_ENDS: dict[str, Callable[[Record, float], Record]] = {
    "returns": succeeded,
    "raises": lambda record, wall: failed(record, "RuntimeError: no", "", wall),
    "is interrupted": interrupted,
}


@dataclass
class Worker:
    """One process: its clock, what it knows, and the exchange that it is in the middle of."""

    observer: Observer
    owned: OwnedLease | None = None
    owner: str = ""
    """Whose uuid the owned began with."""
    body: bool = False
    """Whether a body runs and has not been told to stop."""
    ending: bool = False
    stopped: bool = False
    exchange: Exchange[Any] | None = None
    request: Request | None = None
    answers: list[Any] = field(default_factory=list)
    """What the store has done about the request, on its way back: an answer or an error."""

    @property
    def live(self) -> bool:
        return self.body and not self.stopped and self.in_time

    @property
    def in_time(self) -> bool:
        return self.owned is not None and self.observer.clocks.monotonic() < self.owned.deadline

    def begin(self, exchange: Exchange[Any]) -> None:
        self.exchange, self.request, self.answers = exchange, next(exchange), []


def idle(worker: Worker) -> bool:
    return not worker.stopped and worker.exchange is None and worker.owned is None


def running(worker: Worker) -> bool:
    return not worker.stopped and worker.body and worker.exchange is None


def asking(worker: Worker) -> bool:
    return worker.request is not None and not worker.answers


def unanswered(worker: Worker) -> bool:
    return isinstance(worker.request, Read | Write) and not worker.answers and not worker.stopped


def answered(worker: Worker) -> bool:
    return bool(worker.answers) and not worker.stopped


def busy(worker: Worker) -> bool:
    return worker.exchange is not None and not worker.stopped


def some(condition: Callable[[Worker], bool]) -> Callable[[ProtocolMachine], bool]:
    return lambda machine: any(condition(worker) for worker in machine.workers)


class ProtocolMachine(RuleBasedStateMachine):
    """`steps` counts rules carried out, over all examples."""

    steps = 0
    takeovers = 0

    def make_store(self) -> Store:
        """Fresh for each example."""
        store = MemoryStore("machine")
        store.discard(KEY)
        return store

    @initialize(terms=st.sampled_from([TERMS, FEW]))
    def start(self, terms: Terms) -> None:
        self.now = self.spared_until = 0.0
        self.terms = terms
        self.store = self.make_store()
        self.late: list[Write] = []
        self.record: Record | None = None
        self.tokens: set[int] = set()
        self.confirmed_successes = 0
        self.workers = [self.new_worker(index) for index in range(WORKERS)]

    def new_worker(self, index: int) -> Worker:
        rate = 1 + DRIFT * (index - 1)
        clocks = Clocks(lambda: 1000.0 * index + rate * self.now, lambda: 1e9 + 86_400.0 * index - self.now)
        return Worker(Observer(self.terms, clocks))

    # --- what workers do ---

    def pick(self, number: int, condition: Callable[[Worker], bool]) -> Worker:
        type(self).steps += 1
        found = [worker for worker in self.workers if condition(worker)]
        return found[number % len(found)]

    @precondition(some(idle))
    @rule(number=st.integers(0, WORKERS - 1))
    def try_to_claim(self, number: int) -> None:
        worker = self.pick(number, idle)
        worker.begin(worker.observer.acquire(KEY))

    @precondition(some(running))
    @rule(number=st.integers(0, WORKERS - 1))
    def beat(self, number: int) -> None:
        worker = self.pick(number, running)
        assert worker.owned is not None
        worker.begin(worker.owned.beat())

    @precondition(lambda self: self.now > self.spared_until and some(running)(self))
    @rule(
        number=st.integers(0, WORKERS - 1), how=st.sampled_from(["raises"] * 4 + ["is interrupted"] * 4 + ["returns"])
    )
    def end(self, number: int, how: str) -> None:
        worker = self.pick(number, running)
        assert worker.owned is not None
        worker.body, worker.ending = False, True
        self.spared_until = self.now + 40
        worker.begin(worker.owned.end(HOW_IT_ENDS[how], self.terms.lease))

    # --- what the store and the network do ---

    @precondition(some(asking))
    @rule(number=st.integers(0, WORKERS - 1), fault=st.sampled_from(["none", "none", "none", "none", "error", "torn"]))
    def handle_request(self, number: int, fault: str) -> None:
        """The request takes effect, or fails to. Its answer is on the way: much may happen before it is there."""
        worker = self.pick(number, asking)
        self.handle(worker, fault)

    def handle(self, worker: Worker, fault: str) -> None:
        match worker.request:
            case WaitRequest():
                worker.answers.append(None)
            case Read(key):
                worker.answers.append(StoreError("injected") if fault == "error" else self.store.read(key))
            case Write() as write:
                if worker.owned is not None:
                    writes_as = Record.of_bytes(write.data, KEY).owner
                    assert writes_as == worker.owner, "an owner went on with another's record"
                worker.answers.append(
                    StoreError("injected") if fault == "error" else self.apply(write, fault == "torn")
                )

    @precondition(some(answered))
    @rule(number=st.integers(0, WORKERS - 1), lost=st.integers(0, 4).map(lambda chance: chance == 0))
    def answer(self, number: int, lost: bool) -> None:
        worker = self.pick(number, answered)
        self.give(worker, StoreError("the answer was lost") if lost else worker.answers[0])

    @precondition(some(unanswered))
    @rule(number=st.integers(0, WORKERS - 1))
    def time_out(self, number: int) -> None:
        """The worker hears that its request failed, and the request arrives later."""
        worker = self.pick(number, unanswered)
        if isinstance(worker.request, Write):
            self.late.append(worker.request)
        self.give(worker, StoreError("timed out"))

    @precondition(lambda self: self.late)
    @rule(number=st.integers(0, 9))
    def arrive_late(self, number: int) -> None:
        type(self).steps += 1
        self.apply(self.late.pop(number % len(self.late)), torn=False)

    @precondition(some(busy))
    @rule(number=st.integers(0, WORKERS - 1))
    def let_it_finish(self, number: int) -> None:
        """A storage without faults for as long as one exchange takes: what happens nearly always, and so brings the rest far."""
        self.finish(self.pick(number, busy))

    @precondition(some(idle))
    @rule()
    def all_that_are_idle_look(self) -> None:
        for worker in filter(idle, self.workers):
            type(self).steps += 1
            worker.begin(worker.observer.acquire(KEY))
            self.finish(worker)

    @precondition(some(running))
    @rule(number=st.integers(0, WORKERS - 1), seconds=st.sampled_from([9.0, 22.0]), then=st.sampled_from([9.0, 22.0]))
    def beat_slowly(self, number: int, seconds: float, then: float) -> None:
        """The heartbeat is seen at once, and confirmed late: its lease counts from its start."""
        worker = self.pick(number, running)
        assert worker.owned is not None
        worker.begin(worker.owned.beat())
        self.handle(worker, "none")
        self.all_that_are_idle_look()
        self.pass_time(seconds)
        if worker.exchange is not None:
            self.finish(worker)
        self.pass_time(then)
        self.all_that_are_idle_look()

    @precondition(some(running))
    @rule(number=st.integers(0, WORKERS - 1), how=st.sampled_from(sorted(HOW_IT_ENDS)))
    def end_too_late(self, number: int, how: str) -> None:
        """The last write fails until a peer has taken over, if one is there."""
        worker = self.pick(number, running)
        assert worker.owned is not None
        worker.body, worker.ending = False, True
        worker.begin(worker.owned.end(HOW_IT_ENDS[how], self.terms.lease))
        self.all_that_are_idle_look()
        self.give(worker, StoreError("out of reach"))
        self.pass_time(31.0)
        self.all_that_are_idle_look()
        self.finish(worker)

    def finish(self, worker: Worker) -> None:
        while worker.exchange is not None:
            if not worker.answers:
                self.handle(worker, "none")
            self.give(worker, worker.answers[0])

    # --- what befalls workers ---

    @rule(seconds=st.sampled_from([0.5, 4.0, 9.0, 22.0, 26.0, 31.0]))
    def pass_time(self, seconds: float) -> None:
        type(self).steps += 1
        self.now += seconds
        for worker in self.workers:
            if worker.body and not worker.stopped and not worker.in_time:
                self.tell(worker)

    @precondition(lambda self: self.now > self.spared_until)
    @rule(number=st.integers(0, WORKERS - 1))
    def kill(self, number: int) -> None:
        type(self).steps += 1
        self.spared_until = self.now + 40
        worker = self.workers[number]
        if isinstance(worker.request, Write) and not worker.answers:
            self.late.append(worker.request)
        self.workers[number] = self.new_worker(number)

    @precondition(lambda self: self.now > self.spared_until)
    @rule(number=st.integers(0, WORKERS - 1), told_first=st.booleans())
    def stop_or_go_on(self, number: int, told_first: bool) -> None:
        """SIGSTOP, and SIGCONT: then either of its threads may run first, the one that watches or the one that writes."""
        worker = self.pick(number, lambda _: True)
        worker.stopped = not worker.stopped
        self.spared_until = self.now + 40
        if not worker.stopped and worker.body and not worker.in_time and told_first:
            self.tell(worker)

    # --- how it is kept ---

    def tell(self, worker: Worker) -> None:
        """The lease is lost: the body is told, and the claim is given up without a word."""
        if isinstance(worker.request, Write) and not worker.answers:
            self.late.append(worker.request)
        worker.owned, worker.body, worker.exchange, worker.request, worker.answers = None, False, None, None, []

    def give(self, worker: Worker, answer: Any) -> None:
        assert worker.exchange is not None
        worker.answers = []
        try:
            if isinstance(answer, Exception):
                worker.request = worker.exchange.throw(answer)
            else:
                worker.request = worker.exchange.send(answer)
        except StopIteration as done:
            worker.exchange = worker.request = None
            self.concluded(worker, done.value)
        except (LeaseLost, StoreError):
            worker.exchange = worker.request = None
            if worker.ending or not worker.in_time:
                worker.owned, worker.body, worker.ending = None, False, False
            else:
                assert worker.owned is not None
                worker.owned, worker.body = None, False

    def concluded(self, worker: Worker, result: Any) -> None:
        if isinstance(result, OwnedLease):
            assert result.record.token not in self.tokens, "two owners had the same fencing token"
            self.tokens.add(result.record.token)
            type(self).takeovers += result.record.token > 1
            worker.owned, worker.owner, worker.body = result, result.record.owner, True
        elif worker.ending and worker.owned is not None:
            self.confirmed_successes += worker.owned.record.state is RecordState.SUCCESS
            worker.owned, worker.ending = None, False

    def apply(self, write: Write, torn: bool) -> Any:
        """The write at the store. What it changes is held against the rules of who may write what."""
        new = Record.of_bytes(write.data, KEY)
        try:
            with tearing(torn):
                version = self.store.write(write.key, write.data, write.version)
        except (Conflict, StoreError) as error:
            return error
        self.check_change(self.record, new)
        self.record = new
        return version

    def check_change(self, old: Record | None, new: Record) -> None:
        assert new.revision == (old.revision if old else 0) + 1
        if old is None:
            assert (new.state, new.token) == (RecordState.RUNNING, 1)
            return
        assert old.state is not RecordState.SUCCESS, "a result was overwritten"
        if new.owner == old.owner:
            assert old.state is RecordState.RUNNING, "an owner wrote after its end"
            assert new.token == old.token
        elif new.state is RecordState.RUNNING:
            assert new.token == old.token + 1
        else:
            assert (old.state, new.state) == (RecordState.RUNNING, RecordState.FAILED), "somebody else ended a claim"
            assert self.terms.max_attempts is not None
            assert old.attempts == self.terms.max_attempts

    @invariant()
    def no_two_live_owners(self) -> None:
        live = [worker.owned.record.token for worker in getattr(self, "workers", []) if worker.live and worker.owned]
        assert len(live) <= 1, f"two owners live, with the tokens {live}"

    @invariant()
    def at_most_one_success_and_never_half_a_record(self) -> None:
        if not hasattr(self, "workers"):
            return
        stored = self.store.read(KEY)
        assert (stored and Record.of_bytes(stored.data, KEY)) == self.record
        assert self.confirmed_successes <= 1
        if self.confirmed_successes:
            assert self.record is not None
            assert self.record.state is RecordState.SUCCESS
        if self.record is not None and self.terms.max_attempts is not None:
            assert self.record.attempts <= self.terms.max_attempts


@contextmanager
def tearing(torn: bool) -> Iterator[None]:
    """Has the operating system take half of what is written, and fail. (A store in memory writes nothing to tear.)"""
    if not torn:
        yield
        return

    def half(descriptor: int, data: bytes) -> int:
        write(descriptor, data[: len(data) // 2])
        raise OSError("injected: the disk is gone")

    write = os.write
    with patch("counterpoint.sweep.stores.local.os.write", half):
        yield


class LocalMachine(ProtocolMachine):
    """The same on a disk."""

    steps = 0

    def make_store(self) -> Store:
        """In a directory of its own."""
        self.directory = tempfile.TemporaryDirectory()
        return LocalStore(Path(self.directory.name))

    def teardown(self) -> None:
        """Removes it."""
        if hasattr(self, "directory"):
            self.directory.cleanup()


def run(machine: type[ProtocolMachine], examples: int, steps: int) -> None:
    """Carries the rules out in random orders, and shortens the order that breaks one."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, suppress_health_check=list(HealthCheck), deadline=None
        ),
    )


@pytest.mark.slow
def test_no_two_owners_live_and_no_result_is_overwritten_in_ten_thousand_steps() -> None:
    run(ProtocolMachine, examples=120, steps=100)
    assert ProtocolMachine.steps >= 10_000
    assert ProtocolMachine.takeovers >= 50, "the steps hardly ever reach what is tested"


@pytest.mark.slow
def test_the_same_on_a_local_disk_that_tears_writes() -> None:
    run(LocalMachine, examples=30, steps=60)
    assert LocalMachine.steps >= 1000
