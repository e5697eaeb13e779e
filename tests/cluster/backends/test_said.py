"""What a keeper tells of its worker, as events; what makes no sense is none."""

from __future__ import annotations

import math
from typing import Any

import pytest

from counterpoint.cluster.backends.said import LONGEST_ADDRESS, event_of
from counterpoint.cluster.manager import events
from counterpoint.cluster.manager.events import LONGEST_REASON
from counterpoint.transport.process.keeper import messages

LEADER = ("role-master", 3)


@pytest.mark.parametrize(
    ("message", "event"),
    [
        ({"kind": messages.CREATED, "pid": 7}, events.Created(*LEADER, "node", 7, 1.0)),
        ({"kind": messages.CREATE_FAILED, "reason": "r"}, events.CreateFailed(*LEADER, "r", 1.0)),
        (
            {"kind": messages.EXITED, "code": 2, "reason": "r", "lost": True},
            events.WorkerExited(*LEADER, 2, "r", 1.0, lost=True),
        ),
        ({"kind": messages.READY, "address": "a", "server_key": "k"}, events.WorkerReady(*LEADER, "a", "k", 1.0)),
        ({"kind": messages.STARTED}, events.WorkerStarted(*LEADER, 1.0)),
        ({"kind": messages.FINISHED}, events.WorkFinished(*LEADER, 1.0)),
        ({"kind": messages.ENDING}, events.EndAnnounced(*LEADER, 1.0)),
        ({"kind": messages.EXTEND, "seconds": 2.5}, events.ExtensionRequested(*LEADER, 2.5, 1.0)),
        ({"kind": messages.CHILDREN_CHECKED, "check": 4}, events.ChildrenChecked(*LEADER, 4, 1.0)),
        ({"kind": messages.FAILOVER_DONE, "notice": 5}, events.FailoverDone(*LEADER, 5, 1.0)),
        (
            {"kind": messages.REPLACE, "worker": "role-1", "incarnation": 2, "reason": "slow"},
            events.ReplaceRequested(*LEADER, "role-1", 2, "slow", 1.0),
        ),
        ({"kind": messages.SCALE, "count": 2}, events.ScaleRequested("role", 2, 1.0)),
        ({"kind": messages.STOP_JOB, "reason": "r", "code": 999}, events.JobStopRequested("r", 1, "role-master", 1.0)),
    ],
)
def test_what_a_keeper_tells_is_an_event(message: dict[str, Any], event: events.Event) -> None:
    assert event_of(message, *LEADER, "node", 1.0) == event


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
        {"kind": messages.EXITED, "code": "1", "reason": "", "lost": False},
    ],
)
def test_what_makes_no_sense_is_ignored(message: dict[str, Any]) -> None:
    assert event_of(message, "role-0", 3, "node", 1.0) is None


def test_texts_are_cut() -> None:
    said = {"kind": messages.READY, "address": "a" * 5000, "server_key": "k" * 5000}
    ready = event_of(said, "role-0", 3, "node", 1.0)
    assert isinstance(ready, events.WorkerReady)
    assert (len(ready.address), len(ready.server_key)) == (LONGEST_ADDRESS, LONGEST_ADDRESS)
    ended = event_of({"kind": messages.EXITED, "code": 1, "reason": "x" * 10000, "lost": False}, *LEADER, "node", 1.0)
    assert isinstance(ended, events.WorkerExited)
    assert len(ended.reason) <= LONGEST_REASON
