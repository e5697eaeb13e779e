"""A run gives up where nothing can succeed, and nowhere else: one success, or one failure that may pass, and it goes on."""

from __future__ import annotations

import pytest

from counterpoint.orchestrator.scheduling.giving_up import GROUPS, REFUSED_SECONDS, SECONDS, Failure, GivingUp, Lasting
from counterpoint.orchestrator.scheduling.outcomes import DropReason

REFUSED = Failure(
    Lasting.REFUSED, "RequestRefused my.py:3", "RequestRefused: 400: the prompt is too long (in rollout, my.py:3)"
)
BROKEN = Failure(Lasting.CODE, "KeyError my.py:9", "KeyError: 'x' (in score, my.py:9)")

Ended = tuple[DropReason | None, Failure | None]
FAILED_REFUSED: Ended = (DropReason.FAILED, REFUSED)
FAILED_BROKEN: Ended = (DropReason.FAILED, BROKEN)
MAY_PASS: Ended = (DropReason.FAILED, None)
SUCCEEDED: Ended = (None, None)
UNANSWERED: Ended = (DropReason.INFERENCE_FAILED, None)


def given_up_after(ended: list[Ended], seconds_apart: float = 0.0) -> tuple[int, str] | None:
    rule = GivingUp()
    for number, (dropped, failure) in enumerate(ended, start=1):
        reason = rule.group_finalized(dropped, failure, number * seconds_apart, begun=number, unfinished=[])
        if reason is not None:
            return number, reason
    return None


def test_requests_that_are_always_refused_end_the_run_with_the_reason_in_full() -> None:
    found = given_up_after([FAILED_REFUSED] * 2 * GROUPS, REFUSED_SECONDS / (GROUPS - 2))
    assert found is not None
    assert found[0] == GROUPS
    assert found[1].endswith(f"the first {GROUPS} groups failed, each for this reason: {REFUSED.error}")


def test_refusals_of_a_server_that_begins_end_nothing() -> None:
    assert given_up_after([FAILED_REFUSED] * 100 * GROUPS) is None, "many at once are no long time"
    apart = REFUSED_SECONDS / (4 * GROUPS)
    found = given_up_after([FAILED_REFUSED] * 10 * GROUPS, apart)
    assert found is not None
    assert found[1].startswith(f"nothing can succeed: all rollouts of the first {4 * GROUPS + 1} groups failed")


def test_code_that_always_fails_ends_the_run_once_that_has_lasted() -> None:
    apart = SECONDS / (3 * GROUPS)
    found = given_up_after([FAILED_BROKEN] * 10 * GROUPS, apart)
    assert found is not None
    assert found[0] == 3 * GROUPS + 1
    assert given_up_after([FAILED_BROKEN] * 100 * GROUPS) is None, "many at once are no long time"


@pytest.mark.parametrize("other", [SUCCEEDED, MAY_PASS, (DropReason.INCOMPLETE, None), (DropReason.ADVANTAGE, None)])
@pytest.mark.parametrize("place", [0, GROUPS // 2, GROUPS - 1])
def test_anything_else_and_the_run_goes_on_for_ever(other: Ended, place: int) -> None:
    ended = [FAILED_REFUSED] * 10 * GROUPS
    ended[place] = other
    assert given_up_after(ended, SECONDS) is None


def test_an_advantage_function_that_always_fails_ends_the_run() -> None:
    assert given_up_after([(DropReason.ADVANTAGE, BROKEN)] * GROUPS, SECONDS) == (
        GROUPS,
        f"nothing can succeed: all rollouts of the first {GROUPS} groups failed, each for this reason: {BROKEN.error}",
    )


def test_what_inference_failed_counts_neither_way() -> None:
    assert given_up_after([UNANSWERED] * 1000 * GROUPS, SECONDS) is None
    found = given_up_after([UNANSWERED, FAILED_REFUSED] * GROUPS, REFUSED_SECONDS / GROUPS)
    assert found is not None
    assert found[0] == 2 * GROUPS


def test_the_commonest_reason_is_named() -> None:
    found = given_up_after([FAILED_BROKEN, FAILED_REFUSED, FAILED_BROKEN] * GROUPS, SECONDS)
    assert found is not None
    assert f"{(found[0] * 2 + 1) // 3} of them for this reason: {BROKEN.error}" in found[1]


def test_what_began_earlier_and_takes_longer_is_waited_for() -> None:
    rule = GivingUp()
    for number in range(1, GROUPS + 1):
        assert rule.group_finalized(*FAILED_REFUSED, float(number), begun=40, unfinished=[3, 50]) is None, number
    assert rule.group_finalized(*FAILED_REFUSED, 40.0, begun=60, unfinished=[39, 50]) is None
    assert rule.group_finalized(*FAILED_REFUSED, 50.0, begun=70, unfinished=[40, 50]) is not None
    assert rule.group_finalized(*FAILED_REFUSED, 50.0, begun=70, unfinished=[]) is None, "once is enough"
