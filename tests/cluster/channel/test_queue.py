"""The promises of `cluster.channel.queue`, against arbitrary events, and single cases of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from counterpoint.cluster.channel import queue
from counterpoint.cluster.channel.exactly_once import PositionSet
from counterpoint.cluster.channel.messages import CONSUMER, END, PRODUCER, PUT, SKIP, Head, Kind, Who
from counterpoint.cluster.channel.queue import ChannelSession, Queue, QueueState

PRODUCERS = ("source-0", "source-1")
CONSUMERS = ("trainer-0", "trainer-1")
MAX_DEATHS = 2
Draw = st.DataObject | random.Random
Option = TypeVar("Option")


def pick(draw: Draw, options: Sequence[Option]) -> Option:
    """One of the options, by hypothesis or in a random walk."""
    return draw.choice(options) if isinstance(draw, random.Random) else draw.draw(st.sampled_from(options))


class ChannelMachine(RuleBasedStateMachine):
    """Producers and consumers that come, die, and send things twice; and a host that is killed."""

    def __init__(self) -> None:
        super().__init__()
        self.capacity = 4
        self.queue = Queue(self.capacity, PRODUCERS, MAX_DEATHS)
        self.number = 0
        self.orders: dict[int, Head] = {}
        """Those that are not answered, by number."""
        self.records: dict[int, tuple[str, int]] = {}
        self.lent: dict[int, ChannelSession] = {}
        """Which living session holds each record, by what was told."""
        self.owners: dict[int, str] = {}
        self.gone: set[int] = set()
        """Acknowledged or set aside."""
        self.acknowledged = 0
        self.suspects: dict[int, set[int]] = {}
        """The processes that died at each record."""
        self.idle: set[ChannelSession] = set()
        """The consumers that have acknowledged nothing."""
        self.finished: set[ChannelSession] = set()

    @property
    def producers(self) -> list[ChannelSession]:
        return [each for each in self.queue.sessions.values() if each.who.kind == PRODUCER]

    @property
    def consumers(self) -> list[ChannelSession]:
        return [each for each in self.queue.sessions.values() if each.who.kind == CONSUMER]

    def look(self) -> None:
        """Compares what has been written down, and told, with the promises."""
        notes, self.queue.notes, before = self.queue.notes, [], {**self.owners}
        for change, _ in notes:
            match change:
                case ["put", sequence, origin, position]:
                    assert (origin, position) not in self.records.values(), "a position is stored once"
                    self.records[sequence] = (origin, position)
                case ["own", sequence, name]:
                    assert self.owners.setdefault(sequence, name) == name
                case ["done", numbers]:
                    self.gone.update(numbers)
                case ["aside", sequence]:
                    assert len(self.suspects[sequence]) == MAX_DEATHS
                    self.gone.add(sequence)
        self.lent = {sequence: holder for sequence, holder in self.lent.items() if sequence not in self.gone}
        for session in self.queue.told:
            for sequence in session.lent:
                assert sequence not in self.lent, "lent to two at once"
                assert self.owners.get(sequence, session.who.name) == session.who.name, "a sticky consumer's record"
                assert (self.owners.get(sequence) == session.who.name) >= session.who.sticky
                self.lent[sequence] = session
            in_order = sorted(session.lent, key=lambda each: (before.get(each) != session.who.name, each))
            assert session.lent == in_order, "in the order of their numbers, its own first"
            assert sum(holder is session for holder in self.lent.values()) <= session.who.credit
            for number in session.confirmed:
                head = self.orders.pop(number)
                stored = head.position in self.queue.state.positions.get(head.origin, ())
                assert stored or head.kind == END
            for number, reason in session.refused:
                assert "ended" in reason
                del self.orders[number]
            if session.finished:
                assert self.gone == set(self.records)
                self.finished.add(session)
            session.lent, session.confirmed, session.refused, session.finished = [], [], [], False
        self.queue.told.clear()

    def leaves(self, session: ChannelSession, failed: bool) -> None:
        """What follows, by the model, from the end of a session."""
        held = [sequence for sequence, holder in self.lent.items() if holder is session]
        if held and session in self.idle and failed:
            self.suspects.setdefault(min(held), set()).add(session.who.started)
        self.lent = {sequence: holder for sequence, holder in self.lent.items() if holder is not session}
        for head, _ in session.waiting:
            del self.orders[head.number]

    def join(self, who: Who) -> None:
        earlier = self.queue.sessions.get((who.kind, who.name))
        if earlier is not None:
            self.leaves(earlier, failed=earlier.who.started != who.started)
        session = ChannelSession(who)
        self.idle.add(session)
        self.queue.join(session)
        self.look()

    @initialize(credit=st.integers(1, 3), sticky=st.booleans())
    def begin(self, credit: int, sticky: bool) -> None:
        for name in PRODUCERS:
            self.join_producer(name)
        self.join_consumer(CONSUMERS[0], credit, sticky)

    @rule(name=st.sampled_from(PRODUCERS))
    def join_producer(self, name: str) -> None:
        self.number += 1
        self.join(Who(PRODUCER, name, 1, self.number))

    @rule(name=st.sampled_from(CONSUMERS), credit=st.integers(1, 3), sticky=st.booleans())
    def join_consumer(self, name: str, credit: int, sticky: bool) -> None:
        self.number += 1
        self.join(Who(CONSUMER, name, 1, self.number // 2, credit, sticky))  # two sessions are of one process

    @precondition(lambda self: self.queue.sessions)
    @rule(data=st.data(), failed=st.booleans())
    def leave(self, data: Draw, failed: bool) -> None:
        session = pick(data, [*self.queue.sessions.values()])
        self.leaves(session, failed)
        self.queue.leave(session, failed)
        self.look()

    @precondition(lambda self: self.producers)
    @rule(
        data=st.data(),
        origin=st.sampled_from(PRODUCERS),
        kinds=st.lists(st.sampled_from([PUT, PUT, PUT, SKIP]), min_size=1, max_size=4),
        ahead=st.sampled_from([-2, 0, 0, 0, 1]),
    )
    def order(self, data: Draw, origin: str, kinds: Sequence[Kind], ahead: int) -> None:
        session = pick(data, self.producers)
        for offset, kind in enumerate(kinds):
            self.number += 1
            position = max(0, self.queue.next_position(origin) + ahead + offset * (ahead > 0))
            self.orders[self.number] = Head(kind, self.number, origin, position, 1)
            self.queue.order(session, self.orders[self.number], [b""])
            self.look()

    @precondition(lambda self: self.producers and len(self.records) > 4)
    @rule(data=st.data())
    def end(self, data: Draw) -> None:
        session = pick(data, self.producers)
        self.number += 1
        self.orders[self.number] = Head(END, self.number, session.who.name, 0, 0)
        self.queue.order(session, self.orders[self.number])
        assert session.who.name in self.queue.state.ended
        self.look()

    @precondition(lambda self: self.records and self.consumers)
    @rule(data=st.data(), held=st.booleans())
    def acknowledge(self, data: Draw, held: bool) -> None:
        session = pick(data, self.consumers)
        mine = [sequence for sequence, holder in self.lent.items() if holder is session]
        sequence = pick(data, mine if held and mine else [*self.records])
        allowed = sequence in mine
        known = sequence not in self.gone
        if allowed and known:
            self.idle.discard(session)
            self.acknowledged += 1
        self.queue.acknowledge(session, [sequence, sequence])
        self.look()
        assert (sequence in self.gone) == (allowed or not known)

    @rule()
    def kill_host(self) -> None:
        """Everything but what was written down is lost."""
        state = QueueState()
        for note in self.queue.state.notes():
            state.apply(*note)
        self.queue = Queue(self.capacity, PRODUCERS, MAX_DEATHS, state)
        for kept in (self.lent, self.suspects, self.orders):
            kept.clear()

    @invariant()
    def promises(self) -> None:
        kept = self.queue.state.kept
        assert set(kept) == set(self.records) - self.gone, "nothing is lost"
        assert len(kept) <= self.capacity
        assert all(len(self.suspects.get(sequence, ())) < MAX_DEATHS for sequence in kept)
        assert self.queue.floor == min(kept, default=self.queue.state.next_sequence)
        if len(kept) < self.capacity:
            assert not any(each.waiting for each in self.producers), "there is room"
        for session in self.consumers:
            if sum(holder is session for holder in self.lent.values()) < session.who.credit:
                waiting = set(kept) - set(self.lent)
                assert all(self.owners.get(sequence, session.who.name) != session.who.name for sequence in waiting)
        assert not self.queue.finished or set(self.consumers) <= self.finished


ChannelMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50)
TestChannelMachine = pytest.mark.slow(ChannelMachine.TestCase)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_the_promises_hold_on_a_long_way(seed: int) -> None:
    """Hypothesis tries many short ways; here most events move records, so that deaths meet a channel in full use."""
    draw = random.Random(seed)
    machine = ChannelMachine()
    machine.begin(2, bool(seed % 2))
    for _ in range(800):
        match draw.choices(["order", "done", "join", "leave", "kill"], [8, 8, 4, 1.5, 0.2])[0]:
            case "order" if machine.producers:
                machine.order(draw, draw.choice(PRODUCERS), draw.choices([PUT, SKIP], [20, 1], k=3), 0)
            case "done" if machine.records and machine.consumers:
                machine.acknowledge(draw, draw.random() < 0.9)
            case "join" if draw.random() < 0.3:
                machine.join_producer(draw.choice(PRODUCERS))
            case "join":
                machine.join_consumer(draw.choice(CONSUMERS), draw.choice([1, 2, 3]), draw.random() < 0.5)
            case "leave" if machine.queue.sessions:
                machine.leave(draw, draw.random() < 0.5)
            case "kill":
                machine.kill_host()
        machine.promises()
    assert machine.acknowledged > 100


def consumer(name: str, credit: int = 2, sticky: bool = False, started: int = 0) -> ChannelSession:
    return ChannelSession(Who(CONSUMER, name, 1, started, credit, sticky))


def channel_of(*consumers: ChannelSession, capacity: int = 8, records: int = 0) -> tuple[Queue, ChannelSession]:
    """A channel with `source-0`, so many records, and consumers."""
    channel, producer = Queue(capacity, ["source-0"], MAX_DEATHS), ChannelSession(Who(PRODUCER, "source-0", 1, 0))
    channel.join(producer)
    for each in consumers:
        channel.join(each)
    for position in range(records):
        channel.order(producer, Head(PUT, position, "source-0", position, 1), [b""])
    return channel, producer


def test_a_dead_consumers_records_go_to_another_with_their_numbers_before_new_ones() -> None:
    first, second = consumer("first"), consumer("second", credit=4)
    channel, _ = channel_of(first, records=4)
    channel.join(second)
    channel.leave(first, failed=True)
    assert (first.lent, second.lent) == ([0, 1], [2, 3, 0, 1])
    channel.acknowledge(first, [0])
    assert [*channel.state.kept] == [0, 1, 2, 3], "its late acknowledgement does not count"


def test_a_sticky_consumers_records_wait_for_its_name() -> None:
    first, other, again = consumer("trainer", 3, True), consumer("other", 3), consumer("trainer", 1, True, 1)
    channel, _ = channel_of(first, records=3)
    channel.join(other)
    channel.leave(first, failed=True)
    assert other.lent == []
    channel.join(again)
    channel.acknowledge(again, [1])
    assert again.lent == [0], "1 was not lent yet"
    channel.acknowledge(again, [0])
    assert (again.lent, [*channel.state.kept]) == ([0, 1], [1, 2])


def test_a_record_at_which_consumers_die_is_set_aside_and_its_neighbours_are_not() -> None:
    channel, producer = channel_of(records=3)
    for number in range(MAX_DEATHS):
        victim = consumer(f"{number}", 3, started=number)
        channel.join(victim)
        assert victim.lent == [0, 1, 2]
        channel.leave(victim, failed=True)
    assert ([*channel.state.kept], [*channel.state.aside]) == ([1, 2], [0])
    for number in range(10, 15):  # each acknowledges one before it dies, so nothing is to blame
        victim = consumer("other", 3, sticky=True, started=number)
        channel.join(victim)
        channel.order(producer, Head(PUT, 5, "source-0", number, 1), [b""])
        channel.acknowledge(victim, [min(channel.state.kept)])
        channel.leave(victim, failed=True)
    for number in range(20, 30):  # neither is one that connects again, or says goodbye
        channel.join(consumer("same", 3, started=7))
        polite = consumer("polite", 3, started=number)
        channel.join(polite)
        channel.leave(polite, failed=False)
    assert [*channel.state.aside] == [0]


def test_a_position_too_far_ahead_is_refused_and_the_missing_one_named() -> None:
    channel, producer = channel_of()
    channel.order(producer, Head(PUT, 3, "source-0", queue.MAX_AHEAD + 1, 1), [b""])
    ((number, reason),) = producer.refused
    assert number == 3
    assert "position 0, which is missing" in reason


def test_the_end_comes_after_the_last_acknowledgement_and_is_told_to_whoever_joins_later() -> None:
    trainer, late = consumer("trainer"), consumer("late")
    channel, producer = channel_of(trainer, records=1)
    channel.order(producer, Head(END, 1, "source-0", 0, 0))
    assert not trainer.finished
    channel.acknowledge(trainer, [0])
    channel.join(late)
    assert trainer.finished
    assert late.finished
    channel.order(producer, Head(PUT, 9, "source-0", 1, 1), [b""])
    assert [number for number, _ in producer.refused] == [9]


def test_a_position_set_forgets_what_lies_below_its_floor() -> None:
    positions = PositionSet(2, [4, 5, 9])
    assert 1 in positions
    assert 3 not in positions
    assert not positions.add(4)
    positions.fill_below(4)
    assert (positions.watermark, positions.above) == (6, [9])
    positions.fill_below(20)
    assert (positions.watermark, positions.above) == (20, [])
