"""The rules of a lease: who may take what and when, and what each step writes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from counterpoint.sweep.lease import (
    LONGEST_BACKOFF_SECONDS,
    Assessment,
    Done,
    MarkFailed,
    RecordAges,
    StaysFailed,
    Take,
    TargetHeld,
    Terms,
    assess,
    backoff_seconds,
    claimed,
    failed,
    interrupted,
    marked_failed,
    succeeded,
    with_heartbeat,
)
from counterpoint.sweep.record import LARGEST_BYTES, Record, RecordError, checked_id

TERMS = Terms(heartbeat=30, lease=90)
RUNNING = claimed(None, "target", "owner", "host", 7, TERMS, 1000.0)
FAILED = failed(RUNNING, "ValueError: no", "Traceback ...", 1100.0)
LIMITED = replace(TERMS, max_attempts=2)
LAST = replace(RUNNING, attempts=2)


@pytest.mark.parametrize(
    ("record", "unchanged", "wall", "terms", "assessment"),
    [
        (None, 0, 0, TERMS, Take()),
        (interrupted(RUNNING, 1100.0), 0, 0, TERMS, Take()),
        (succeeded(RUNNING, 1100.0), 1e9, 1e9, TERMS, Done(succeeded(RUNNING, 1100.0))),
        (RUNNING, 0, 1e9, TERMS, TargetHeld(90, RUNNING)),
        (RUNNING, 89.5, 1e9, TERMS, TargetHeld(0.5, RUNNING)),
        (RUNNING, 90, 0, TERMS, Take()),
        (RUNNING, 90, 0, LIMITED, Take()),
        (LAST, 90, 0, LIMITED, MarkFailed()),
        (LAST, 89, 0, LIMITED, TargetHeld(1, LAST)),
        (FAILED, 0, 1110.0, TERMS, TargetHeld(20, FAILED)),
        (FAILED, 0, 1130.0, TERMS, Take()),
        (FAILED, 30, 0.0, TERMS, Take()),
        (FAILED, 10, 0.0, TERMS, TargetHeld(20, FAILED)),
        (FAILED, 1e9, 1e9, replace(TERMS, force_run_failed=False), StaysFailed(FAILED)),
        (replace(FAILED, attempts=2), 1e9, 1e9, LIMITED, StaysFailed(replace(FAILED, attempts=2))),
        (replace(FAILED, attempts=1), 1e9, 1e9, LIMITED, Take()),
    ],
)
def test_what_an_observer_may_do(
    record: Record | None, unchanged: float, wall: float, terms: Terms, assessment: Assessment
) -> None:
    assert assess(record, unchanged, wall, terms) == assessment


def test_the_lease_counts_as_its_owner_wrote_it_and_not_as_the_observer_would() -> None:
    assert assess(RUNNING, 10, 0, Terms(heartbeat=1, lease=2)) == TargetHeld(80, RUNNING)


def test_a_sighting_begins_anew_with_every_change() -> None:
    record_ages = RecordAges()
    assert record_ages.unchanged_seconds("a", "1", 100.0) == 0
    assert record_ages.unchanged_seconds("b", "1", 110.0) == 0
    assert record_ages.unchanged_seconds("a", "1", 130.0) == 30
    assert record_ages.unchanged_seconds("a", "2", 140.0) == 0
    assert record_ages.unchanged_seconds("a", None, 150.0) == 0
    assert record_ages.unchanged_seconds("a", "2", 160.0) == 0


def test_tokens_rise_with_claims_and_attempts_do_not_count_what_was_given_back() -> None:
    first = claimed(None, "target", "one", "host", 1, TERMS, 0.0)
    back = interrupted(with_heartbeat(first, 1.0), 2.0)
    second = claimed(back, "target", "two", "host", 2, TERMS, 3.0)
    assert [(each.token, each.attempts, each.revision) for each in (first, back, second)] == [
        (1, 1, 1),
        (1, 0, 3),
        (2, 1, 4),
    ]
    third = claimed(failed(second, "no", "", 4.0), "target", "three", "host", 3, TERMS, 5.0)
    assert (third.token, third.attempts, third.error) == (3, 2, "no")
    assert succeeded(third, 6.0).error is None


def test_a_vanished_owner_is_named_by_who_follows() -> None:
    expected = "attempt 1 on host, process 7, sent no heartbeat for 90 s"
    assert claimed(RUNNING, "target", "next", "host", 8, TERMS, 0.0).error == expected
    gone = marked_failed(RUNNING, "observer", 0.0)
    assert (gone.state, gone.error, gone.owner) == ("FAILED", expected, "observer")


def test_the_pause_after_a_failure_doubles_up_to_its_limit() -> None:
    assert [backoff_seconds(attempts, TERMS) for attempts in (1, 2, 3, 4)] == [30, 60, 120, 240]
    assert backoff_seconds(10**9, TERMS) == LONGEST_BACKOFF_SECONDS


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heartbeat": 0.0}, "heartbeat is 0.0 s; it must be above 0"),
        ({"heartbeat": float("nan")}, "heartbeat is nan s"),
        ({"heartbeat": 50.0}, "lease is 90.0 s; it must be at least twice the heartbeat of 50.0 s"),
        ({"lease": float("inf"), "heartbeat": float("inf")}, "heartbeat is inf s"),
        ({"max_attempts": 0}, "max_attempts is 0; it must be at least 1, or None"),
    ],
)
def test_terms_that_cannot_be_kept_are_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Terms(**fields)  # type: ignore[arg-type]


def test_an_owner_stops_before_a_peer_may_begin() -> None:
    assert TERMS.safe_seconds == 75


# --- the record ---


def test_a_record_is_read_as_it_was_written() -> None:
    for record in (RUNNING, FAILED, succeeded(RUNNING, 1.0)):
        assert Record.of_bytes(record.to_bytes(), "target") == record


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "s3://x: target is not a sweep's record of format 1: Expecting value"),
        (RUNNING.to_bytes()[:40], "is not a sweep's record"),
        (b"[]", "no object with format 1"),
        (b'{"format": 2}', "no object with format 1"),
        (b'{"format": 1}', "move it away to run its target afresh"),
        (RUNNING.to_bytes().replace(b'"token": 1', b'"token": -1'), "token is -1, not a whole number"),
        (RUNNING.to_bytes().replace(b'"lease_seconds": 90', b'"lease_seconds": NaN'), "lease_seconds is nan"),
        (RUNNING.to_bytes().replace(b"RUNNING", b"WALKING"), "'WALKING' is not a valid RecordState"),
        (RUNNING.to_bytes().replace(b'"target"', b'"../target"'), "'../target' is not an id"),
        (RUNNING.to_bytes().replace(b'"target"', b'"another"'), "it is that of another"),
        (RUNNING.to_bytes().replace(b'"finished_at": null', b'"finished_at": "noon"'), "finished_at is 'noon'"),
        (RUNNING.to_bytes().replace(b'"owner": "owner"', b'"owner": null'), "owner is None, not a text"),
        (RUNNING.to_bytes().replace(b'"error": null', b'"error": [1]'), r"error is \[1\], not a text"),
        (b"[" * LARGEST_BYTES, "is not a sweep's record"),
        (b" " * (LARGEST_BYTES + 1), "more than 65536 bytes"),
        (b"\xff\xfe", "is not a sweep's record"),
    ],
)
def test_what_is_no_record_is_refused_by_name(data: bytes, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        Record.of_bytes(data, "target", "s3://x")


def test_a_long_error_is_cut_and_the_end_of_its_traceback_kept() -> None:
    record = failed(RUNNING, "\U0001f600" * 10**6, "\U0001f600" * 10**6 + "the end", 0.0)
    assert Record.of_bytes(record.to_bytes(), "target") == record
    assert record.traceback is not None
    assert record.traceback.endswith("the end")


@pytest.mark.parametrize("target_id", ["a", "lr-0.1_seed-3", "A" * 200, "-a", "a b", "lr=0.1,wd=0", "ä", "a.json.gz"])
def test_ids_that_are_safe(target_id: str) -> None:
    assert checked_id(target_id) == target_id


@pytest.mark.parametrize(
    "target_id", ["", ".", "..", "a/b", "a\\b", ".hidden", "a" * 201, "ä" * 101, " a", "a\n", "a.json", 3]
)
def test_ids_that_are_not_safe_as_file_names(target_id: str) -> None:
    with pytest.raises(ValueError, match="is not an id"):
        checked_id(target_id)
