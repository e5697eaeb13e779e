"""Several masters on one journal, a request at a time, in every order and with every fault.

As in `tests/sweep/test_protocol_machine.py`: a request may fail before or after its effect, its answer may be lost, and it may
arrive long after its sender has given it up, or has died. Whatever happens, what a master was told is appended is in the journal
of every later master, at its place; and no master appends after one of a higher epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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

from counterpoint.cluster.errors import StaleMasterError
from counterpoint.cluster.master.journal import History, Journal
from counterpoint.cluster.master.journal_format import ENTRY, entry_of_bytes, number_of
from counterpoint.sweep.protocol import Discard, Exchange, Pause, Request, Write, answer_of, perform
from counterpoint.sweep.store import Conflict, StoreError
from counterpoint.sweep.stores.memory import MemoryStore

MASTERS = 3


@dataclass(eq=False)
class Running:
    """An exchange that a master is in the middle of."""

    exchange: Exchange[Any]
    request: Request | None = None
    answers: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.request = next(self.exchange)


@dataclass(eq=False)
class Master:
    """One process: its journal, the state that it folded, and what it is doing."""

    journal: Journal
    state: list[Any] | None = None
    """What was appended, in order; None until the journal is open."""
    main: Running | None = None
    beside: Running | None = None
    """The writing of a snapshot."""

    @property
    def running(self) -> list[Running]:
        return [one for one in (self.main, self.beside) if one is not None]


def busy(master: Master) -> bool:
    return bool(master.running)


def idle(master: Master) -> bool:
    return master.state is not None and master.main is None


def may_snapshot(master: Master) -> bool:
    return idle(master) and master.beside is None and not master.journal.has_pending


def some(condition: Callable[[Master], bool]) -> Callable[[JournalMachine], bool]:
    return lambda machine: any(condition(master) for master in machine.masters)


class JournalMachine(RuleBasedStateMachine):
    """`truth` is what took effect first at each number."""

    confirmed = 0
    discarded = 0
    refused = 0

    @initialize()
    def start(self) -> None:
        self.store = MemoryStore("journal machine")
        for key in list(self.store.keys()):
            self.store.discard(key)
        self.epoch = 0
        self.content = 0
        self.late: list[Request] = []
        self.truth: dict[int, tuple[int, Any]] = {}
        self.masters = [self.new_master() for _ in range(MASTERS)]

    def new_master(self) -> Master:
        self.epoch += 1
        journal = Journal("machine", self.epoch, now=lambda: 0.0)
        master = Master(journal)
        master.main = Running(journal.open(lambda history: [{"opened": journal.epoch, "after": history.last}]))
        return master

    def pick(self, number: int, condition: Callable[[Master], bool]) -> Master:
        found = [master for master in self.masters if condition(master)]
        return found[number % len(found)]

    # --- what masters do ---

    @precondition(some(idle))
    @rule(number=st.integers(0, MASTERS - 1), patient=st.booleans())
    def append(self, number: int, patient: bool) -> None:
        master = self.pick(number, idle)
        give_up = float("inf") if patient else 0.0
        if master.journal.has_pending:
            master.main = Running(master.journal.retry(give_up))
            return
        self.content += 1
        master.main = Running(master.journal.append([{"content": self.content}], None, give_up))

    @precondition(some(may_snapshot))
    @rule(number=st.integers(0, MASTERS - 1))
    def snapshot(self, number: int) -> None:
        master = self.pick(number, may_snapshot)
        taken = master.journal.take_snapshot({"all": master.state})
        master.beside = Running(master.journal.write_snapshot(taken))

    @rule(number=st.integers(0, MASTERS - 1))
    def kill(self, number: int) -> None:
        """What it has sent may arrive later."""
        for running in self.masters[number].running:
            if running.request is not None and not running.answers:
                self.late.append(running.request)
        self.masters[number] = self.new_master()

    # --- what the store and the network do ---

    @precondition(some(busy))
    @rule(number=st.integers(0, 5), steps=st.integers(1, 12))
    def advance(self, number: int, steps: int) -> None:
        """Requests are answered without a fault."""
        for _ in range(steps):
            running = self.one_running(number)
            if running is None:
                return
            if not running.answers:
                running.answers.append(self.effect(running.request))
            self.give(running, running.answers[0])

    @precondition(some(busy))
    @rule(number=st.integers(0, MASTERS - 1))
    def finish(self, number: int) -> None:
        """Nothing goes wrong for as long as a master's exchanges take: what happens nearly always."""
        master = self.pick(number, busy)
        while master.running:
            running = master.running[0]
            self.give(running, running.answers[0] if running.answers else self.effect(running.request))

    @precondition(some(busy))
    @rule(number=st.integers(0, 5), fault=st.sampled_from(["before", "after", "late"]))
    def fail(self, number: int, fault: str) -> None:
        running = self.one_running(number)
        if running is None or isinstance(running.request, Pause):
            return
        if not running.answers and fault == "after":
            self.effect(running.request)
        if not running.answers and fault == "late" and running.request is not None:
            self.late.append(running.request)
        self.give(running, StoreError("injected"))

    @precondition(some(busy))
    @rule(number=st.integers(0, 5))
    def take_effect(self, number: int) -> None:
        """The request has its effect, and the answer is on its way."""
        running = self.one_running(number)
        if running is not None and not running.answers:
            running.answers.append(self.effect(running.request))

    @precondition(lambda self: self.late)
    @rule(number=st.integers(0, 9))
    def arrive_late(self, number: int) -> None:
        self.effect(self.late.pop(number % len(self.late)))

    def one_running(self, number: int) -> Running | None:
        found = [running for master in self.masters for running in master.running]
        return found[number % len(found)] if found else None

    def effect(self, request: Request | None) -> Any:
        assert request is not None
        if isinstance(request, Pause):
            return None
        try:
            answer = answer_of(self.store, request)
        except (Conflict, StoreError) as error:
            return error
        if isinstance(request, Discard):
            type(self).discarded += 1
        if isinstance(request, Write) and (number := number_of(request.key, ENTRY)) is not None:
            entry = entry_of_bytes(request.data, number, "machine")
            self.truth.setdefault(number, (entry.epoch, list(entry.events)))
        return answer

    # --- how it goes on ---

    def give(self, running: Running, answer: Any) -> None:
        master = next(one for one in self.masters if running in one.running)
        running.answers = []
        try:
            if isinstance(answer, Exception):
                running.request = running.exchange.throw(answer)
            else:
                running.request = running.exchange.send(answer)
            return
        except StopIteration as end:
            result = end.value
        except StaleMasterError:
            type(self).refused += 1
            assert any(epoch > master.journal.epoch for epoch, _ in self.truth.values())
            master.main = master.beside = None
            self.masters[self.masters.index(master)] = self.new_master()
            return
        except StoreError:
            result = None
        is_main = running is master.main
        if is_main:
            master.main = None
        else:
            master.beside = None
        if is_main and result is not None:
            self.confirm(master, result)

    def confirm(self, master: Master, result: Any) -> None:
        """A master was told that its entry is durable."""
        type(self).confirmed += 1
        if isinstance(result, History):
            master.state = list(result.snapshot.state["all"]) if result.snapshot else []
            for entry in result.entries:
                master.state += entry.events
            last = result.last
        else:
            assert master.state is not None
            master.state += result.events
            last = result.number
        assert self.truth[last][0] == master.journal.epoch, "another master's entry was confirmed"
        assert master.state == self.fold(last), "a master's state is not the journal's fold"

    def fold(self, last: int) -> list[Any]:
        return [event for number in range(1, last + 1) for event in self.truth[number][1]]

    @invariant()
    def epochs_never_fall(self) -> None:
        truth = getattr(self, "truth", {})
        epochs = [truth[number][0] for number in sorted(truth)]
        assert sorted(truth) == list(range(1, len(truth) + 1)), "there is a gap"
        assert epochs == sorted(epochs), "a master appended after one of a higher epoch"

    def teardown(self) -> None:
        """A last master reads everything that was ever confirmed."""
        if not hasattr(self, "truth"):
            return
        self.epoch += 1
        journal = Journal("machine", self.epoch, now=lambda: 0.0)
        history = perform(self.store, journal.open(lambda read: [], give_up=0.0))
        state = list(history.snapshot.state["all"]) if history.snapshot else []
        for entry in history.entries[:-1]:
            state += entry.events
        assert state == self.fold(len(self.truth))


def test_no_master_appends_after_a_later_one() -> None:
    run_state_machine_as_test(
        JournalMachine,
        settings=settings(
            max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
    assert JournalMachine.confirmed > 100
    assert JournalMachine.discarded > 20
    assert JournalMachine.refused > 20
