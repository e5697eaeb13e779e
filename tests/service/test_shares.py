"""Shares of the servers: who has a place next, whatever others ask for."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter, defaultdict
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from counterpoint.service.shared_calls import SharedCalls
from counterpoint.service.shares import SHARE, Shares, WaitingCall
from tests.support.polling import until

KEYS = st.sampled_from("abcd")


class Machine(RuleBasedStateMachine):
    """Keys ask, withdraw and end calls in any order, while servers come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = Shares(4)
        self.waiting: dict[WaitingCall, int] = {}
        self.held: list[WaitingCall] = []
        self.asked = 0

    def begin(self) -> None:
        for call in self.shares.begin():
            number = self.waiting.pop(call)
            assert not call.withdrawn
            own = [each for other, each in self.waiting.items() if other.key == call.key]
            assert number <= min(own, default=number), "a key's own calls begin in their order"
            self.held.append(call)

    @rule(key=KEYS, number=st.integers(0, 5), tokens=st.integers(1, 1000))
    def ask(self, key: str, number: int, tokens: int) -> None:
        self.waiting[self.shares.ask(key, number, tokens)] = number
        self.begin()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(list(self.waiting)))
        del self.waiting[call]
        self.shares.withdraw(call)
        self.begin()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=st.integers(0, 1000))
    def end(self, data: st.DataObject, tokens: int) -> None:
        call = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.shares.end(call, min(tokens, call.tokens))
        self.begin()

    @rule(places=st.integers(1, 40))
    def resize(self, places: int) -> None:
        self.shares.places = places
        self.begin()

    @invariant()
    def no_key_waits_without_need(self) -> None:
        """A key that has no place gets one while any is free, and one with a few gets more while there are enough."""
        held, free = Counter(call.key for call in self.held), self.shares.places - len(self.held)
        for call in self.waiting:
            assert free <= 0 or (held[call.key] and held[call.key] + 1 > SHARE * (free - 1))

    @invariant()
    def what_is_withdrawn_is_not_kept(self) -> None:
        kept = sum(len(mine.waiting) for mine in self.shares._keys.values())
        assert kept <= 2 * len(self.waiting) + len(self.shares._keys)


TestShares = pytest.mark.slow(Machine.TestCase)
TestShares.settings = settings(max_examples=60, stateful_step_count=40)


def served(shares: Shares, lengths: dict[str, int], calls: int) -> list[Counter[str]]:
    """Tokens that each key has got after each of so many ends of the oldest call; each always asks for more of one length."""
    held: list[WaitingCall] = []
    for key, tokens in lengths.items():
        for _ in range(2 * shares.places):
            shares.ask(key, 0, tokens)
    found = [Counter[str]()]
    for _ in range(calls):
        for call in shares.begin():
            held.append(call)
            shares.ask(call.key, 0, call.tokens)
        ended = held.pop(0)
        shares.end(ended, ended.tokens)
        found.append(found[-1] + Counter({ended.key: ended.tokens}))
    return found


@pytest.mark.slow
@given(st.lists(st.integers(1, 1000), min_size=2, max_size=4))
def test_few_places_are_shared_by_tokens(lengths: list[int]) -> None:
    """With one place the order is all that is shared: over any time two keys are within two of the longest calls of each."""
    asked = {str(number): tokens for number, tokens in enumerate(lengths)}
    found = served(Shares(1), asked, 200)
    for first, last in pairwise(found[::20]):
        got = [last[key] - first[key] for key in asked]
        assert max(got) - min(got) <= 4 * max(lengths)


def test_a_key_that_comes_has_a_place_at_once_and_then_as_many_as_the_others() -> None:
    shares = Shares(64)
    for key in "abcd":
        for _ in range(1000):
            shares.ask(key, 0, 8192)
    held: defaultdict[str, list[WaitingCall]] = defaultdict(list)
    for call in shares.begin():
        held[call.key].append(call)
    mine = shares.ask("e", 0, 12)
    assert shares.begin() == [mine]
    held["e"].append(mine)
    for _ in range(1000):
        shares.ask("e", 0, 12)
    for number in range(2000):
        if own := held["abcde"[number % 5]]:
            shares.end(call := own.pop(), call.tokens)
        for call in shares.begin():
            held[call.key].append(call)
    most = max(map(len, held.values()))
    assert all(len(own) >= most - 3 for own in held.values()), {key: len(own) for key, own in held.items()}


def test_one_key_alone_has_most_places_and_where_there_is_one_key_all() -> None:
    for alone, most in ((False, 51), (True, 64)):
        shares = Shares(64, alone=alone)
        for _ in range(200):
            shares.ask("a", 0, 100)
        assert len(shares.begin()) == most


def test_a_key_that_was_away_has_saved_nothing() -> None:
    shares = Shares(1)
    shares.ask("b", 0, 1)
    shares.end(shares.begin()[0], 1)
    for _ in range(50):
        shares.ask("a", 0, 100)
    for _ in range(20):
        shares.end(shares.begin()[0], 100)
    for _ in range(50):
        shares.ask("b", 0, 100)
    order = []
    for _ in range(20):
        order += [call := shares.begin()[0]]
        shares.end(call, 100)
    assert abs(Counter(call.key for call in order)["b"] - 10) <= 1


async def test_requests_of_thousands_of_samples_do_not_hold_up_another_keys() -> None:
    """Forty times 1,024 samples that never end, as long as nobody ends them; another key's one begins at once."""
    calls, begun = SharedCalls(), Counter[str]()
    calls.resize(64)

    async def work(key: str) -> str:
        begun[key] += 1
        if key == "a":
            await asyncio.Event().wait()
        return key

    def ask(key: str, count: int) -> asyncio.Task[list[str]]:
        return asyncio.create_task(calls.gathered(key, [(1000, partial(work, key))] * count, len))

    large = [ask("a", 1024) for _ in range(40)]
    await until(lambda: begun["a"] == 51, "the places that a key may have")
    before = len(asyncio.all_tasks())
    assert before < 200, "what waits is no task for each sample"
    for _ in range(5):
        assert await ask("b", 8) == ["b"] * 8
    assert begun["a"] == 51
    for each in large:
        each.cancel()
    await asyncio.gather(*large, return_exceptions=True)
    assert await asyncio.gather(*(ask("b", 30) for _ in range(5))) == [["b"] * 30] * 5


async def test_a_call_that_fails_or_is_cancelled_gives_its_place_back() -> None:
    calls = SharedCalls(alone=True)
    calls.resize(2)

    async def fails() -> str:
        raise ValueError

    async def ends() -> str:
        return "x"

    with pytest.raises(ExceptionGroup):
        await calls.gathered("a", [(1, fails), (1, ends), (1, ends)], len)
    for _ in range(5):  # also before the call has begun, and while it has a place already
        task = asyncio.create_task(calls.gathered("a", [(1, ends)] * 3, len))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert await calls.gathered("a", [(1, ends)] * 5, len) == ["x"] * 5
    assert calls._shares._held == 0


async def test_calls_that_are_cancelled_are_freed_at_once() -> None:
    """A key that cancels again and again would leave a hundred thousand objects, whose collection holds the loop."""

    class Held:
        """What a call has."""

    calls, begun = SharedCalls(alone=True), list[weakref.ref[Held]]()
    calls.resize(8)

    async def work() -> int:
        held = Held()
        begun.append(weakref.ref(held))
        await asyncio.Event().wait()
        return 0

    async def cancelled() -> None:
        asked = [asyncio.create_task(calls.gathered("a", ((1, work) for _ in range(8)), int))]
        await until(lambda: len(begun) == 8, "all calls")
        asked[0].cancel()
        await asyncio.wait(asked)

    gc.disable()
    try:
        await cancelled()
        await asyncio.sleep(0)
        assert not any(each() for each in begun)
    finally:
        gc.enable()
