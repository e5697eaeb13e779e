"""Whether a server makes progress, from what its monitor sees at each look."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from counterpoint.inference.clients.capacity import Observation
from counterpoint.inference.pool.progress import ABSENT_SECONDS, STUCK_SECONDS, ServerProgress

LONGEST, PAUSE = 600.0, 40.0


def report(held: int, tokens: int) -> Observation:
    return Observation(0.1, held, 0, 0, held, tokens)


def first_reason(looks: list[tuple[float, int, int, Observation | None]]) -> tuple[float, str] | None:
    """Time and reason of the first look at which the server is not to be used any longer."""
    progress = ServerProgress(LONGEST, PAUSE)
    reasons = ((now, progress.observe(now, requests, answered, seen)) for now, requests, answered, seen in looks)
    return next((found for found in reasons if found[1]), None)


def test_requests_that_never_reach_the_engine() -> None:
    found = first_reason([(now, 8, 3, report(0, 50)) for now in range(100, 700, 2)])
    assert found is not None
    assert found[0] == 100 + ABSENT_SECONDS
    assert "none of 8 requests" in found[1]


def test_an_engine_that_has_requests_and_computes_nothing() -> None:
    found = first_reason([(now, 8, 3, report(8, 50)) for now in range(100, 700, 2)])
    assert found is not None
    assert found[0] == 100 + STUCK_SECONDS


def test_a_report_that_stays_away_is_not_said_to_be_an_engine_that_stands() -> None:
    """One report, then none."""
    found = first_reason([(now, 8, 3, report(8, 50) if now == 100 else None) for now in range(100, 700, 2)])
    assert found is not None
    assert found[0] == 100 + STUCK_SECONDS
    assert "reported nothing" in found[1]
    assert "token" not in found[1]


def test_whoever_reports_nothing_has_as_long_as_a_request() -> None:
    found = first_reason([(now, 8, 3, None) for now in range(100, 900, 2)])
    assert found is not None
    assert found[0] == 100 + LONGEST


def test_tokens_for_others_excuse_no_longer_than_a_request_may_take() -> None:
    found = first_reason([(now, 8, 3, report(5, now)) for now in range(100, 900, 2)])
    assert found is not None
    assert found[0] == 100 + LONGEST


def test_a_report_that_stays_away_excuses_nothing() -> None:
    found = first_reason([(now, 8, 3, report(0, 50) if now == 100 else None) for now in range(100, 700, 2)])
    assert found is not None
    assert found[0] == 100 + ABSENT_SECONDS


def test_silence_begins_with_the_first_request() -> None:
    looks = [(now, 8 if now > 500 else 0, 3, report(0, 50)) for now in range(100, 700, 2)]
    found = first_reason([(float(now), requests, answered, seen) for now, requests, answered, seen in looks])
    assert found is not None
    assert found[0] == 500 + ABSENT_SECONDS


def test_a_pause_of_this_process_is_no_silence_of_the_server() -> None:
    """A debugger, `docker pause` or a blocked loop pauses so: all stood still, and the first look shows what was before."""
    before = [(float(now), 8, 3, report(8, 50)) for now in range(100, 110, 2)]
    for pause in (STUCK_SECONDS + 10, LONGEST + 10):
        assert first_reason([*before, (108 + pause, 8, 3, report(8, 50)), (110 + pause, 8, 3, report(8, 60))]) is None
    found = first_reason([*before, *((now, 8, 3, report(8, 50)) for now in range(300, 500, 2))])
    assert found is not None
    assert found[0] == 300 + STUCK_SECONDS, "it counts anew"


def test_steps_that_take_longer_are_waited_for_once_that_was_seen() -> None:
    """A prompt takes one step of 200 s: the first one is given up, a later one is not."""
    progress = ServerProgress(LONGEST, PAUSE)

    def is_given_up(now: int) -> bool:
        reason = progress.observe(float(now), 8, 3 + now // 400, report(8, now // 200))
        if reason:
            progress.begin()
        return bool(reason)

    assert sum(map(is_given_up, range(0, 2000, 2))) == 1


@given(st.lists(st.tuples(st.floats(0.1, ABSENT_SECONDS - 1), st.integers(0, 9), st.booleans(), st.integers(0, 3))))
def test_a_server_that_answers_now_and_then_stays(looks: list[tuple[float, int, bool, int]]) -> None:
    now, progress = 1000.0, ServerProgress(LONGEST, PAUSE)
    for answered, (pause, requests, reports, held) in enumerate(looks):
        now += pause
        assert progress.observe(now, requests, answered, report(held, 0) if reports else None) == ""
