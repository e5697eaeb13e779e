"""Real small runs: each fault that was made on purpose is named soon after a person can see it, and a healthy run is not."""

from __future__ import annotations

import pytest

from counterpoint.orchestrator.early_warnings.rules import Sign, found_in
from counterpoint.orchestrator.early_warnings.seen import Seen
from tests.orchestrator.early_warnings.recorded import recorded

SOON = 20
"""Steps from when a fault is visible until it is named."""

FAULTS: dict[str, tuple[int, set[Sign]]] = {
    # From step 16 on the reward is above a half and the held-out score below.
    "constant_answer_wins": (16, {Sign.CONSTANT_ANSWER, Sign.HELD_OUT}),
    "limit_of_4_tokens": (1, {Sign.CUT}),
    "rate_30_times_too_high": (3, {Sign.ENTROPY}),
    "stale_server": (8, {Sign.STALE_WEIGHTS}),  # 5 % of the tokens are lost then
    "wrong_clip": (2, {Sign.MASKED}),
}


def first_steps(name: str) -> dict[Sign, int]:
    seen, first = Seen(), dict[Sign, int]()
    for line in recorded(name):
        seen.add(line)
        for found in found_in(seen):
            first.setdefault(found.sign, line["step"])
    return first


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str) -> None:
    visible, signs = FAULTS[name]
    first = first_steps(name)
    assert {sign: first.get(sign) for sign in signs if not visible <= first.get(sign, 999) <= visible + SOON} == {}


def test_a_healthy_run_is_not_named() -> None:
    assert first_steps("healthy_0") == {}
