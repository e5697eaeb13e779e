"""Events as JSON: every kind comes back as it was, and what is too large fails its cause."""

from __future__ import annotations

import typing
from dataclasses import fields
from typing import Any

import orjson
import pytest

from counterpoint.cluster.manager.events import (
    AllocationFailed,
    Event,
    ExtensionRequested,
    GuestsChanged,
    StopRequested,
    WorkerExited,
    WorkerReady,
    WorkerSilent,
)
from counterpoint.cluster.master.event_codec import UnknownEvent, decode, encode, fitting

EXAMPLES: dict[str, Any] = {"str": "text", "int": 3, "float": 2.5, "bool": True, "tuple[str, ...]": ("a", "b")}


@pytest.mark.parametrize("kind", typing.get_args(Event))
def test_every_event_comes_back(kind: Any) -> None:
    event = kind(**{one.name: EXAMPLES[str(one.type)] for one in fields(kind)})
    assert decode(orjson.loads(orjson.dumps(encode(event)))) == event


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kind": "Nonsense"}, "'Nonsense' is no event"),
        ({"kind": ["Tick"]}, r"\['Tick'\] is no event"),
        ({"kind": "x" * 2**20}, r"^.{,100} is no event"),
        ({"kind": "Tick"}, "Tick has the fields"),
        ({"kind": "Tick", "at": "now"}, r"Tick.at is 'now'; expected float"),
        ({"kind": "Tick", "at": True}, "Tick.at is True"),
    ],
)
def test_what_is_no_event_is_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownEvent, match=message):
        decode(data)


def test_a_long_reason_is_cut() -> None:
    event = fitting(WorkerExited("a-0", 1, 1, "x" * 5000, 0.0))
    assert isinstance(event, WorkerExited)
    assert (len(event.reason), event.reason[-5:]) == (2000, "(cut)")


def test_what_is_too_large_counts_against_its_worker() -> None:
    assert fitting(WorkerReady("a-0", 2, "x" * 100_000, "", 5.0)) == WorkerSilent("a-0", 2, 0.0, 5.0)
    with pytest.raises(ValueError, match=r"GuestsChanged has .* bytes"):
        fitting(GuestsChanged(("x" * 100_000,), 0.0))


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), True, "soon"])
def test_what_would_not_come_back_counts_against_its_worker(seconds: Any) -> None:
    assert fitting(ExtensionRequested("a-0", 2, seconds, 5.0)) == WorkerSilent("a-0", 2, 0.0, 5.0)


def test_what_would_not_come_back_and_is_of_no_worker_is_refused() -> None:
    with pytest.raises(ValueError, match=r"StopRequested.code is True; expected int"):
        fitting(StopRequested("x", True, "", 0.0))


def test_a_reason_that_is_no_text_is_made_one() -> None:
    event = fitting(AllocationFailed("bundle", 1, "no file b\udcff \N{SNOWMAN}", False, 0.0))
    assert event == AllocationFailed("bundle", 1, "no file b? \N{SNOWMAN}", False, 0.0)
