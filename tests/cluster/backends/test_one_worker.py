"""What a worker's process says, and how it ends, as events; what makes no sense is none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from counterpoint.cluster.backends.one_worker import CUT_OFF, LONGEST_ADDRESS, OneWorker
from counterpoint.cluster.backends.order import WorkerOrder
from counterpoint.cluster.manager import events
from counterpoint.cluster.manager.events import LONGEST_REASON
from counterpoint.transport.process.keeper import messages

Told = list[tuple[type[events.Event], Mapping[str, Any]]]


def worker(name: str = "role-0", *, is_command: bool = False, notifies: bool = True) -> tuple[OneWorker, Told]:
    told: Told = []
    description = {} if is_command else {"worker": name}
    order = WorkerOrder(name, 3, "bundle", ("true",), {}, "log", notifies=notifies, description=description)
    made = OneWorker(order, "node", lambda event, fields: told.append((event, fields)))
    made.spawned(77)
    return made, told


@pytest.mark.parametrize(
    ("message", "event", "fields"),
    [
        ({"kind": messages.READY, "address": "a", "server_key": "k"}, events.WorkerReady, {"address": "a"}),
        ({"kind": messages.STARTED}, events.WorkerStarted, {}),
        ({"kind": messages.FINISHED}, events.WorkFinished, {}),
        ({"kind": messages.ENDING}, events.EndAnnounced, {}),
        ({"kind": messages.EXTEND, "seconds": 2.5}, events.ExtensionRequested, {"seconds": 2.5}),
        ({"kind": messages.CHILDREN_CHECKED, "check": 4}, events.ChildrenChecked, {"check": 4}),
        ({"kind": messages.FAILOVER_DONE, "notice": 5}, events.FailoverDone, {"notice": 5}),
        (
            {"kind": messages.REPLACE, "worker": "role-1", "incarnation": 2, "reason": "slow"},
            events.ReplaceRequested,
            {"by": "role-master", "by_incarnation": 3, "worker": "role-1", "incarnation": 2},
        ),
        ({"kind": messages.SCALE, "count": 2}, events.ScaleRequested, {"role": "role", "count": 2}),
        (
            {"kind": messages.STOP_JOB, "reason": "r", "code": 999},
            events.StopRequested,
            {"code": 1, "by": "role-master"},
        ),
    ],
)
def test_what_a_process_says_is_an_event(
    message: dict[str, Any], event: type[events.Event], fields: dict[str, Any]
) -> None:
    one, told = worker("role-master")
    one.hear(message)
    assert told[-1][0] is event
    assert fields.items() <= told[-1][1].items()


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "no such"},
        {"kind": messages.EXTEND, "seconds": math.inf},
        {"kind": messages.EXTEND, "seconds": "1"},
        {"kind": messages.CHILDREN_CHECKED, "check": True},
        {"kind": messages.REPLACE, "worker": 1, "incarnation": 2, "reason": ""},
        {"kind": messages.SCALE, "count": 2},  # a worker that is no SubMaster
        {"kind": messages.STOP_JOB, "reason": None, "code": 0},
    ],
)
def test_what_makes_no_sense_is_ignored(message: dict[str, Any]) -> None:
    one, told = worker()
    one.hear(message)
    assert [event for event, _ in told] == [events.Created]


def test_texts_are_cut_and_readiness_is_told_once() -> None:
    one, told = worker()
    for _ in range(2):
        one.hear({"kind": messages.READY, "address": "a" * 5000})
    one.hear({"kind": messages.FAILED, "reason": "x" * 10000})
    one.exited(1)
    assert [event for event, _ in told] == [events.Created, events.WorkerReady, events.WorkerExited]
    assert len(told[1][1]["address"]) == LONGEST_ADDRESS
    assert len(told[2][1]["reason"]) <= LONGEST_REASON
    assert one.living() is None


def test_a_command_is_started_with_its_process_and_knows_no_failover() -> None:
    one, told = worker(is_command=True, notifies=False)
    assert one.answer({"kind": messages.START})
    assert one.answer({"kind": messages.FAILOVER, "notice": 9})
    names = [event for event, _ in told]
    assert names == [events.Created, events.WorkerReady, events.WorkerStarted, events.FailoverDone]


def test_an_order_of_a_class_is_its_process_s_until_it_has_started() -> None:
    one, told = worker()
    assert not one.answer({"kind": messages.START})
    one.hear({"kind": messages.STARTED})
    assert one.answer({"kind": messages.START})
    assert [event for event, _ in told].count(events.WorkerStarted) == 2


@pytest.mark.parametrize(
    ("state", "code", "expected", "reason", "lost"),
    [
        ({}, 0, 0, "why", False),
        ({"cut_off": "no master"}, 0, CUT_OFF, "why", True),
        ({"cut_off": "no master"}, 5, 5, "why", False),  # it failed on its own
        ({"cut_off": "no master", "killed": True}, 1, CUT_OFF, "why", True),
    ],
)
def test_how_a_process_ended(state: dict[str, Any], code: int, expected: int, reason: str, lost: bool) -> None:
    one, told = worker()
    one.hear({"kind": messages.FAILED, "reason": "why"})
    for name, value in state.items():
        setattr(one, name, value)
    one.exited(code)
    assert told[-1][1].items() >= {"code": expected, "reason": reason, "lost": lost}.items()


def test_a_command_that_another_hand_ended_gave_no_reason_for_it() -> None:
    one, told = worker(is_command=True)
    one.hear({"kind": messages.FAILED, "reason": "survived"})
    one.exited(143)
    assert told[-1][1]["reason"] == ""
