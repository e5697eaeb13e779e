"""A keeper's promises, against arbitrary events in any order."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.transport.process.keeper import decisions, messages
from counterpoint.transport.process.keeper.decisions import Keeping

LEASE = 10.0
ORDER = {
    "worker": "w-0",
    "incarnation": 1,
    "bundle": "w-0",
    "node": "node-0",
    "command": ["true"],
    "description": {},
    "notifies": True,
    "stop_timeout_seconds": 5.0,
}
OF_A_CLASS = ORDER | {"description": {"worker": "w-0"}}

said = st.sampled_from(
    [
        {"kind": messages.READY, "address": "a", "server_key": ""},
        {"kind": messages.STARTED},
        {"kind": messages.FINISHED},
        {"kind": messages.FAILED, "reason": "why"},
        {"kind": messages.ALIVE, "status": "fine"},
        {"kind": messages.STOP_JOB, "reason": "done", "code": 0},
        *({"kind": messages.REPLACE, "worker": f"w-{n}", "incarnation": 1, "reason": ""} for n in range(3)),
        *({"kind": messages.EXTEND, "seconds": float(n)} for n in range(40)),
        {"kind": messages.EXTEND, "seconds": float("nan")},
        {"kind": messages.STOP_JOB, "reason": "", "code": True},
        {"kind": messages.READY},
        {"kind": "nonsense"},
    ]
)
orders = st.sampled_from(
    [
        {"kind": messages.LIFE},
        {"kind": messages.STOP},
        {"kind": messages.KILL},
        {"kind": messages.END},
        {"kind": messages.SEND, "message": {"kind": messages.START}},
        {"kind": messages.SEND, "message": {"kind": messages.FAILOVER, "notice": 3, "failed": []}},
        {"kind": messages.SEND},
        {"kind": messages.ACKNOWLEDGE, "number": "all"},
        {"kind": "nonsense"},
    ]
)
masters = st.integers(1, 3)
events = st.one_of(
    st.tuples(st.just("hello"), masters, st.sampled_from([{}, ORDER, OF_A_CLASS])),
    st.tuples(st.just("order"), masters, orders),
    st.tuples(st.just("acknowledge"), masters, st.none()),
    st.tuples(st.just("gone"), masters, st.none()),
    st.tuples(st.just("said"), st.none(), said),
    st.tuples(st.just("exits"), st.none(), st.sampled_from([0, 1, 137, 143])),
    st.tuples(st.just("passes"), st.none(), st.floats(0.0, 15.0)),
)


class World:
    """A keeper, its process, and masters that never forget what they were told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.keeping = Keeping(self.now)
        self.starts = 0
        self.is_over = self.ending = False
        self.highest = 0
        self.heard = 0.0
        self.told: dict[int, list[int]] = {}
        self.acknowledged = 0

    def do(self, decided: list[Any], asked_by: int = 0) -> None:
        for instruction in decided:
            match instruction:
                case (decisions.START, _):
                    assert not self.ending, "what ends starts nothing"
                    self.starts += 1
                    self.do(self.keeping.started(7))
                case (decisions.SEND | decisions.TERMINATE | decisions.KILL, *_):
                    assert self.keeping.lives
                case (decisions.TELL, _):
                    assert self.keeping.master == self.highest
                case (decisions.DISMISS, peer, message):
                    assert message == {"kind": messages.REFUSED, "epoch": self.keeping.epoch}
                    assert peer == asked_by or peer < asked_by
                    self.keeping.gone(peer)
                case (decisions.FINISH,):
                    assert not self.is_over, "once"
                    assert not self.keeping.lives, "never while the worker lives"
                    self.is_over = True
        assert self.starts <= 1
        if self.now - self.heard > LEASE and self.starts:
            assert self.keeping.ending

    def step(self, what: str, who: int | None, value: Any) -> None:
        keeping = self.keeping
        match what:
            case "hello" if who is not None:
                hello = {"kind": messages.HELLO, "epoch": who, "lease_seconds": LEASE} | (
                    {"order": value} if value else {}
                )
                self.hear_of(who)
                self.do(keeping.receive(who, hello, self.now), who)
                if who == self.highest and keeping.master == who:
                    self.told[who] = []
            case "order" | "acknowledge" if who is not None:
                if what == "acknowledge":
                    if who == keeping.master:
                        self.acknowledged = max([self.acknowledged, *self.told.get(who, [])])
                    value = {"kind": messages.ACKNOWLEDGE, "number": max(self.told.get(who, []), default=0)}
                if who == keeping.master:
                    self.hear_of(who)
                self.do(keeping.receive(who, value, self.now), who)
            case "gone":
                keeping.gone(who)
            case "said":
                keeping.hear(value)
            case "exits" if keeping.lives:
                self.do(keeping.exited(value))
            case "passes":
                self.now += value
                self.do(keeping.tick(self.now))
        while keeping.master is not None and (message := keeping.next_message()) is not None:
            told = self.told.setdefault(keeping.master, [])  # type: ignore[arg-type]
            assert not told or message["number"] > told[-1], "in order, each once"
            told.append(message["number"])
        self.ending = self.ending or bool(keeping.ending)
        assert bool(keeping.ending) == self.ending, "it never goes back on its end"
        assert len(keeping._kept) <= len(messages.SAID) + 3 + decisions.MOST_REQUESTS
        if keeping.master is not None:
            unacknowledged = [number for number in keeping._kept if number > self.acknowledged]
            assert set(unacknowledged) <= set(self.told[keeping.master])  # type: ignore[index]

    def hear_of(self, epoch: int) -> None:
        self.highest = max(self.highest, epoch)
        if epoch >= self.keeping.epoch and self.now - self.heard <= LEASE:
            self.heard = self.now


@given(st.lists(events, max_size=60), st.sampled_from([ORDER, OF_A_CLASS]))
@settings(max_examples=300, deadline=None)
def test_the_promises_hold_in_any_order(happened: list[tuple[str, int | None, Any]], order: dict[str, Any]) -> None:
    world = World()
    for what, who, value in [("hello", 1, order), *happened]:
        if not world.is_over:
            world.step(what, who, value)
    while not world.is_over:  # without a master all ends
        if world.keeping.lives and world.keeping._killed:
            world.step("exits", None, 137)
        if not world.is_over:
            world.step("passes", None, 6.0)
    assert world.starts == 1


def begun(order: dict[str, Any] = ORDER) -> Keeping:
    keeping = Keeping(0.0)
    keeping.receive("m", {"kind": messages.HELLO, "epoch": 1, "lease_seconds": LEASE, "order": order}, 0.0)
    keeping.started(7)
    return keeping


def end_of(keeping: Keeping, code: int) -> dict[str, Any]:
    keeping.exited(code)
    return list(keeping._kept.values())[-1]


def test_an_end_by_the_lease_is_a_loss_and_never_complete_work() -> None:
    for code, lost in ((0, True), (143, True), (137, True), (1, False)):
        keeping = begun()
        assert keeping.tick(LEASE) == []
        assert keeping.tick(LEASE + 0.1) == [(decisions.TERMINATE,)]
        if code == 137:
            assert keeping.tick(LEASE + 5.2) == [(decisions.KILL,)]
        told = end_of(keeping, code)
        assert (told["lost"], told["code"]) == (lost, 137 if lost else code)


def test_work_that_was_complete_is_no_loss() -> None:
    keeping = begun(OF_A_CLASS)
    keeping.hear({"kind": messages.FINISHED})
    assert keeping.tick(LEASE + 1) == [(decisions.SEND, {"kind": messages.STOP})]
    assert end_of(keeping, 0) == {"kind": messages.EXITED, "code": 0, "reason": "", "lost": False}


def test_what_a_command_survived_is_not_the_reason_why_another_hand_ended_it() -> None:
    for order, code, reason in ((ORDER, 143, ""), (ORDER, 1, "why"), (OF_A_CLASS, 143, "why")):
        keeping = begun(order)
        keeping.hear({"kind": messages.FAILED, "reason": "why"})
        assert end_of(keeping, code)["reason"] == reason


def test_the_work_of_a_command_begins_with_its_process() -> None:
    keeping = begun(ORDER | {"notifies": False})
    for order in (messages.START, messages.START, messages.FAILOVER):
        message = {"kind": messages.SEND, "message": {"kind": order, "notice": 3}}
        assert keeping.receive("m", message, 1.0) == []
    told = [message["kind"] for message in iter(keeping.next_message, None)]
    assert told == [messages.CREATED, messages.READY, messages.STARTED, messages.FAILOVER_DONE]


def test_a_class_is_ready_once_and_starts_by_itself_until_it_has() -> None:
    keeping, start = begun(OF_A_CLASS), {"kind": messages.START}
    for address in ("a", "b"):
        keeping.hear({"kind": messages.READY, "address": address, "server_key": ""})
    assert keeping.receive("m", {"kind": messages.SEND, "message": start}, 1.0) == [(decisions.SEND, start)]
    for _ in range(2):
        keeping.hear({"kind": messages.STARTED})
        assert keeping.receive("m", {"kind": messages.SEND, "message": start}, 1.0) == []
    told = list(iter(keeping.next_message, None))
    assert [(each["kind"], each.get("address")) for each in told] == [
        (messages.CREATED, None),
        (messages.READY, "a"),
        (messages.STARTED, None),
    ]
