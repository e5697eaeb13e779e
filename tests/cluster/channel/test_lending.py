"""The promises of `cluster.channel.lending`, against arbitrary events, and single cases of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from counterpoint.cluster.channel import lending
from counterpoint.cluster.channel.lending import Lending, LendingState
from counterpoint.cluster.channel.lending_events import (
    Acknowledged,
    Confirm,
    ConsumerJoined,
    Drop,
    Event,
    Finish,
    Forget,
    Grant,
    Instruction,
    Left,
    Lend,
    NoteSkip,
    ProducerEnded,
    ProducerJoined,
    Put,
    Refuse,
    Renewed,
    SetAside,
    Skipped,
    Store,
    TimePassed,
    Wanted,
)
from counterpoint.cluster.channel.positions import PositionSet

PRODUCERS = ("source-0", "source-1")
CONSUMERS = ("trainer-0", "trainer-1")
LEASE = 10.0
MAX_DEATHS = 2


Draw = st.DataObject | random.Random

Option = TypeVar("Option")


def pick(draw: Draw, options: Sequence[Option]) -> Option:
    """One of the options, by hypothesis or in a random walk."""
    return draw.choice(options) if isinstance(draw, random.Random) else draw.draw(st.sampled_from(options))


class ChannelMachine(RuleBasedStateMachine):
    """Producers and consumers that come, die, are silent, send things twice; and a host that is killed."""

    def __init__(self) -> None:
        super().__init__()
        self.capacity = 4
        self.lending = Lending(self.capacity, PRODUCERS, LEASE, MAX_DEATHS)
        self.now = 0.0
        self.last_session = 0
        self.producers: dict[int, str] = {}
        self.consumers: dict[int, tuple[str, int, bool]] = {}
        self.credit: dict[int, int] = {}
        self.records: dict[int, tuple[str, int]] = {}
        self.lent: dict[int, int] = {}
        """Which living session holds each record, by the instructions."""
        self.owners: dict[int, str] = {}
        self.acknowledged: set[int] = set()
        """Acknowledged or set aside."""
        self.suspects: dict[int, set[int]] = {}
        """The processes that died at each record."""
        self.idle: set[int] = set()
        """The sessions of consumers that have acknowledged nothing."""
        self.skipped: set[tuple[str, int]] = set()
        self.finished: set[int] = set()

    def apply(self, event: Event) -> list[Instruction]:
        done = self.lending.handle(event)
        for instruction in done:
            match instruction:
                case Store(sequence, origin, position):
                    assert sequence not in self.records
                    assert (origin, position) not in self.records.values(), "a position is stored once"
                    self.records[sequence] = (origin, position)
                case Lend(session, sequence, note_for):
                    assert session in self.consumers
                    assert sequence in self.records
                    assert sequence not in self.acknowledged
                    assert sequence not in self.lent, "lent to two at once"
                    name, credit, sticky = self.consumers[session]
                    waiting = set(self.records) - self.acknowledged - set(self.lent)
                    own = [each for each in waiting if self.owners.get(each) == name]
                    assert sequence == min(own or waiting - set(self.owners)), "in the order of their numbers"
                    assert self.owners.get(sequence, name) == name, "a sticky consumer's record went to another"
                    assert (note_for == name) == (sticky and sequence not in self.owners)
                    if note_for:
                        self.owners[sequence] = name
                    self.lent[sequence] = session
                    assert sum(holder == session for holder in self.lent.values()) <= credit
                case NoteSkip(origin, position):
                    assert (origin, position) not in self.records.values()
                    self.skipped.add((origin, position))
                case Forget(sequence):
                    assert sequence not in self.acknowledged
                    self.acknowledged.add(sequence)
                    self.lent.pop(sequence, None)
                case SetAside(sequence, deaths):
                    assert len(self.suspects[sequence]) == deaths == MAX_DEATHS
                    assert sequence not in self.lent
                    self.acknowledged.add(sequence)
                case Grant(session, count):
                    self.credit[session] += count
                case Finish(session):
                    assert self.acknowledged == set(self.records)
                    assert set(PRODUCERS) <= self.lending.state.ended
                    self.finished.add(session)
                case Drop(session):
                    self.gone(session)
                case _:
                    pass
        return done

    def gone(self, session: int, failed: bool = True) -> None:
        held = [sequence for sequence, holder in self.lent.items() if holder == session]
        if held and session in self.idle and failed:
            self.suspects.setdefault(min(held), set()).add(session // 2)
        self.producers.pop(session, None)
        self.consumers.pop(session, None)
        self.credit.pop(session, None)
        self.lent = {sequence: holder for sequence, holder in self.lent.items() if holder != session}

    def session(self) -> int:
        self.last_session += 1
        return self.last_session

    @initialize(credit=st.integers(1, 3), sticky=st.booleans())
    def begin(self, credit: int, sticky: bool) -> None:
        for name in PRODUCERS:
            self.join_producer(name, False)
            self.apply(Wanted(self.last_session, 2))
        self.join_consumer(CONSUMERS[0], credit, sticky, False)

    @rule(name=st.sampled_from(PRODUCERS), replace=st.sampled_from([False, False, True]))
    def join_producer(self, name: str, replace: bool) -> None:
        if name in self.producers.values() and not replace:
            return
        session = self.session()
        self.producers[session] = name
        self.credit[session] = 0
        self.apply(ProducerJoined(session, name, self.now))

    @rule(
        name=st.sampled_from(CONSUMERS),
        credit=st.integers(1, 3),
        sticky=st.booleans(),
        replace=st.sampled_from([False, False, True]),
    )
    def join_consumer(self, name: str, credit: int, sticky: bool, replace: bool) -> None:
        earlier = [each for each, (other, *_) in self.consumers.items() if other == name]
        if earlier and not replace:
            return
        session = self.session()
        for each in earlier:
            self.gone(each)
        self.consumers[session] = (name, credit, sticky)
        self.idle.add(session)
        self.apply(
            ConsumerJoined(session, name, credit, sticky, self.now, session // 2)
        )  # two sessions are of one process

    @precondition(lambda self: self.producers or self.consumers)
    @rule(data=st.data(), failed=st.booleans())
    def leave(self, data: Draw, failed: bool) -> None:
        session = pick(data, [*self.producers, *self.consumers])
        self.gone(session, failed)
        self.apply(Left(session, failed))

    @precondition(lambda self: self.producers)
    @rule(data=st.data(), count=st.integers(1, 6))
    def want(self, data: Draw, count: int) -> None:
        self.apply(Wanted(pick(data, [*self.producers]), count))

    @precondition(lambda self: self.producers)
    @rule(
        data=st.data(),
        origin=st.sampled_from(PRODUCERS),
        ahead=st.lists(st.sampled_from([-2, -1, 0, 0, 0, 1]), max_size=4),
    )
    def put(self, data: Draw, origin: str, ahead: list[int]) -> None:
        session = pick(data, [*self.producers])
        self.apply(Wanted(session, len(ahead)))
        for each in ahead:
            position = max(0, self.lending.next_position(origin) + each)
            known = (origin, position) in self.records.values() or (origin, position) in self.skipped
            refused = self.lending.finished or self.producers[session] in self.lending.state.ended
            has_credit = self.credit[session] > 0
            self.credit[session] -= has_credit
            expected = Confirm if has_credit and (known or not refused) else Refuse
            assert self.answers(Put(session, 7, origin, position)) == [expected]

    def answers(self, event: Event) -> list[type]:
        return [type(each) for each in self.apply(event) if isinstance(each, Confirm | Refuse)]

    @precondition(lambda self: self.producers)
    @rule(data=st.data(), origin=st.sampled_from(PRODUCERS), ahead=st.sampled_from([-1, 1, 2]))
    def skip(self, data: Draw, origin: str, ahead: int) -> None:
        position = max(0, self.lending.next_position(origin) + ahead)
        self.apply(Skipped(pick(data, [*self.producers]), 7, origin, position))

    @precondition(lambda self: self.producers and len(self.records) > 4)
    @rule(data=st.data())
    def end(self, data: Draw) -> None:
        self.apply(ProducerEnded(pick(data, [*self.producers])))

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def acknowledge(self, data: Draw) -> None:
        for sequence in {pick(data, [*self.lent]) for _ in range(2)}:
            self.idle.discard(self.lent[sequence])
            self.apply(Acknowledged(self.lent[sequence], sequence))
            assert sequence in self.acknowledged

    @precondition(lambda self: self.records and self.consumers)
    @rule(data=st.data())
    def acknowledge_anything(self, data: Draw) -> None:
        sequence = pick(data, [*self.records])
        session = pick(data, [*self.consumers])
        allowed = self.lent.get(sequence) == session or self.owners.get(sequence) == self.consumers[session][0]
        known = sequence in self.lending.state.kept
        if allowed and known:
            self.idle.discard(session)
        assert (Forget(sequence) in self.apply(Acknowledged(session, sequence))) == (allowed and known)

    @rule(seconds=st.sampled_from([0.1, 6.0]), data=st.data())
    def pass_time(self, seconds: float, data: Draw) -> None:
        self.now += seconds
        for session in [*self.producers, *self.consumers]:
            if pick(data, [True, True, False]):
                self.apply(Renewed(session, self.now))
        self.apply(TimePassed(self.now))

    @rule()
    def kill_host(self) -> None:
        """Everything but the state is lost: sessions, credit, who holds what, who died at what."""
        old = self.lending.state
        state = LendingState(
            old.next_sequence,
            {origin: PositionSet(each.watermark, each.above) for origin, each in old.positions.items()},
            set(old.ended),
            dict(old.kept),
            dict(old.owners),
        )
        self.lending = Lending(self.capacity, PRODUCERS, LEASE, MAX_DEATHS, state)
        self.producers.clear()
        self.consumers.clear()
        self.credit.clear()
        self.lent.clear()
        self.suspects.clear()

    @invariant()
    def no_record_costs_more_deaths(self) -> None:
        assert all(len(self.suspects.get(sequence, ())) < MAX_DEATHS for sequence in self.lending.state.kept)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert set(self.lending.state.kept) == set(self.records) - self.acknowledged

    @invariant()
    def bounded(self) -> None:
        assert len(self.lending.state.kept) + self.lending.outstanding <= self.capacity
        assert self.lending.outstanding == sum(self.credit.values())

    @invariant()
    def whatever_can_be_lent_is(self) -> None:
        for session, (name, credit, _) in self.consumers.items():
            if sum(holder == session for holder in self.lent.values()) < credit:
                waiting = set(self.lending.state.kept) - set(self.lent)
                assert all(self.owners.get(sequence, name) != name for sequence in waiting if sequence in self.owners)
                assert all(sequence in self.owners for sequence in waiting)

    @invariant()
    def the_end_is_told(self) -> None:
        if self.lending.finished:
            assert set(self.consumers) <= self.finished

    @invariant()
    def the_floor_is_the_lowest_record(self) -> None:
        assert self.lending.floor == min(self.lending.state.kept, default=self.lending.state.next_sequence)


ChannelMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50)
TestChannelMachine = pytest.mark.slow(ChannelMachine.TestCase)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_the_promises_hold_on_a_long_way(seed: int) -> None:
    """Hypothesis tries many short ways; here most events move records, so that deaths meet a channel in full use."""
    draw = random.Random(seed)
    machine = ChannelMachine()
    machine.begin(2, bool(seed % 2))
    steps: dict[Callable[[], None], float] = {
        lambda: machine.put(draw, draw.choice(PRODUCERS), draw.choices([-1, 0, 1], [1, 8, 1], k=3)): 8,
        lambda: machine.acknowledge(draw): 7,
        lambda: machine.acknowledge_anything(draw): 1,
        lambda: machine.skip(draw, draw.choice(PRODUCERS), 1): 0.3,
        lambda: machine.join_producer(draw.choice(PRODUCERS), draw.random() < 0.1): 3,
        lambda: machine.join_consumer(
            draw.choice(CONSUMERS), draw.choice([1, 2, 3]), draw.random() < 0.5, draw.random() < 0.1
        ): 3,
        lambda: machine.leave(draw, draw.random() < 0.5): 1.5,
        lambda: machine.pass_time(draw.choice([0.1, 6.0]), draw): 0.5,
        machine.kill_host: 0.2,
    }
    ready: list[Callable[[], bool]] = [
        *(lambda: bool(machine.producers), lambda: bool(machine.lent)),
        lambda: bool(machine.records and machine.consumers),
        lambda: bool(machine.producers),
        *[lambda: True] * 2,
        lambda: bool(machine.producers or machine.consumers),
        *[lambda: True] * 2,
    ]
    for _ in range(600):
        ((step, allowed),) = draw.choices([*zip(steps, ready, strict=True)], [*steps.values()])
        if allowed():
            step()
            machine.nothing_is_lost()
            machine.bounded()
            machine.whatever_can_be_lent_is()
            machine.the_floor_is_the_lowest_record()
    assert len(machine.acknowledged) > 100


def joined(capacity: int = 8, **consumers: bool) -> Lending:
    """A channel with the producer `source-0` as session 1, with credit for everything, and sticky or other consumers."""
    channel = Lending(capacity, ["source-0"], LEASE, MAX_DEATHS)
    channel.handle(ProducerJoined(1, "source-0", 0.0))
    channel.handle(Wanted(1, capacity))
    for session, (name, sticky) in enumerate(consumers.items(), 2):
        channel.handle(ConsumerJoined(session, name, 2, sticky, 0.0))
    return channel


def lent(instructions: list[Instruction]) -> list[tuple[int, int]]:
    return [(each.session, each.sequence) for each in instructions if isinstance(each, Lend)]


def test_a_dead_consumers_records_go_to_another_with_their_numbers_before_new_ones() -> None:
    channel = joined(first=False)
    for position in range(4):
        channel.handle(Put(1, position, "source-0", position))
    assert lent(channel.handle(ConsumerJoined(3, "second", 4, False, 0.0))) == [(3, 2), (3, 3)]
    assert lent(channel.handle(Left(2, failed=True))) == [(3, 0), (3, 1)]


def test_a_sticky_consumers_records_wait_for_its_name() -> None:
    channel = joined(trainer=True, other=True)
    for position in range(2):
        channel.handle(Put(1, position, "source-0", position))
    assert lent(channel.handle(Left(2, failed=True))) == []
    assert lent(channel.handle(ConsumerJoined(4, "trainer", 2, True, 1.0))) == [(4, 0)]


def test_a_sticky_consumer_may_acknowledge_what_its_new_session_was_not_lent_yet() -> None:
    channel = joined(trainer=True)
    for position in range(3):
        channel.handle(Put(1, position, "source-0", position))
    assert lent(channel.handle(ConsumerJoined(3, "trainer", 1, True, 1.0))) == [(3, 0)]
    assert channel.handle(Acknowledged(3, 1)) == [Forget(1)]
    assert lent(channel.handle(Acknowledged(3, 0))) == [(3, 2)]


def test_a_silent_consumer_loses_its_lease_and_its_late_acknowledgement_does_not_count() -> None:
    channel = joined(first=False)
    channel.handle(Put(1, 0, "source-0", 0))
    channel.handle(ConsumerJoined(3, "second", 1, False, 0.0))
    channel.handle(Renewed(1, 9.0))
    channel.handle(Renewed(3, 9.0))
    done = channel.handle(TimePassed(11.0))
    assert Drop(2, replaced=False) in done
    assert lent(done) == [(3, 0)]
    assert channel.handle(Acknowledged(2, 0)) == []
    assert Forget(0) in channel.handle(Acknowledged(3, 0))


def test_a_record_at_which_consumers_die_is_set_aside_and_its_neighbours_are_not() -> None:
    channel = joined()
    for position in range(3):
        channel.handle(Put(1, position, "source-0", position))
    for session in range(2, 2 + MAX_DEATHS):
        assert lent(channel.handle(ConsumerJoined(session, f"{session}", 3, False, 0.0, session))) == [
            (session, sequence) for sequence in range(3)
        ]
        done = channel.handle(Left(session, failed=True))
    assert done == [SetAside(0, MAX_DEATHS)]
    assert [*channel.state.kept] == [1, 2]
    for session in range(10, 15):  # each acknowledges one before it dies, so nothing is to blame
        channel.handle(ConsumerJoined(session, "other", 3, True, 0.0, session))
        channel.handle(Put(1, 5, "source-0", session))
        channel.handle(Acknowledged(session, min(channel.state.kept)))
        assert not [each for each in channel.handle(Left(session, failed=True)) if isinstance(each, SetAside)]


def test_a_process_that_connects_again_or_says_goodbye_is_no_death() -> None:
    channel = joined()
    channel.handle(Put(1, 0, "source-0", 0))
    for session in range(2, 10):
        channel.handle(ConsumerJoined(session, "same", 3, False, 0.0, 7))
    for session in range(10, 20):
        channel.handle(ConsumerJoined(session, "polite", 3, False, 0.0, session))
        channel.handle(Left(session, failed=False))
    assert [*channel.state.kept] == [0]


def test_credit_of_a_dead_producer_goes_to_another() -> None:
    channel = Lending(1, PRODUCERS, LEASE, MAX_DEATHS)
    for session, name in enumerate(PRODUCERS, 1):
        channel.handle(ProducerJoined(session, name, 0.0))
    assert channel.handle(Wanted(1, 1)) == [Grant(1, 1)]
    assert channel.handle(Wanted(2, 1)) == []
    assert channel.handle(Left(1, failed=True)) == [Grant(2, 1)]


def test_producers_take_turns_for_credit() -> None:
    channel = Lending(2 * lending.CREDIT_AT_ONCE, PRODUCERS, LEASE, MAX_DEATHS)
    for session, name in enumerate(PRODUCERS, 1):
        channel.handle(ProducerJoined(session, name, 0.0))
    channel.handle(Wanted(1, 2 * lending.CREDIT_AT_ONCE))
    for position in range(lending.CREDIT_AT_ONCE):
        channel.handle(Put(1, position, "source-0", position))
    channel.handle(Wanted(1, 100))
    channel.handle(Wanted(2, 100))
    channel.handle(ConsumerJoined(3, "trainer", 100, False, 0.0))
    granted = [each.session for n in range(4) for each in channel.handle(Acknowledged(3, n)) if isinstance(each, Grant)]
    assert set(granted) == {1, 2}


def test_a_position_too_far_ahead_is_refused_and_the_missing_one_named() -> None:
    channel = joined()
    refused, *_ = channel.handle(Put(1, 3, "source-0", lending.MAX_AHEAD + 1))
    assert isinstance(refused, Refuse)
    assert "position 0, which is missing" in refused.reason


def test_the_end_comes_after_the_last_acknowledgement_and_is_told_to_whoever_joins_later() -> None:
    channel = joined(trainer=False)
    channel.handle(Put(1, 0, "source-0", 0))
    assert Finish(2) not in channel.handle(ProducerEnded(1))
    assert channel.handle(Acknowledged(2, 0))[-1] == Finish(2)
    assert channel.handle(ConsumerJoined(3, "late", 1, False, 0.0)) == [Finish(3)]
    refused, *_ = channel.handle(Put(1, 9, "source-0", 1))
    assert isinstance(refused, Refuse)


def test_a_position_set_forgets_what_lies_below_its_floor() -> None:
    positions = PositionSet(2, [4, 5, 9])
    assert 1 in positions
    assert 3 not in positions
    assert not positions.add(4)
    positions.fill_below(4)
    assert (positions.watermark, positions.above) == (6, [9])
    positions.fill_below(20)
    assert (positions.watermark, positions.above) == (20, [])
