"""What is short of its share because it was too old is found in the metrics, and said once."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from counterpoint.orchestrator.step.shares import (
    LEAST_ROLLOUTS,
    LEAST_STEPS,
    ShortfallLog,
    length_of,
    metric_of,
    shortfalls,
)

SHARES = {"examples/fast/share": 0.5, "examples/slow/share": 0.5}


def line(fast: int = 0, slow: int = 0, stale: int = 0, **others: Any) -> dict[str, Any]:
    """So many rollouts trained of a fast and a slow environment, and so many of the slow one that were too old."""
    counts = {"trained/fast/1-2s": fast, "trained/slow/8-16s": slow, "stale/slow/8-16s": stale}
    return SHARES | {name: count for name, count in counts.items() if count} | others


@pytest.mark.parametrize(
    ("seconds", "length"),
    [
        (None, "unknown"),
        (0.0, "0-1s"),
        (0.99, "0-1s"),
        (1.0, "1-2s"),
        (12.0, "8-16s"),
        (16.0, "16-32s"),
        (1e9, "8192-16384s"),
    ],
)
def test_lengths_are_powers_of_two(seconds: float | None, length: str) -> None:
    assert length_of(seconds) == length
    assert metric_of("stale", "slow", seconds) == f"stale/slow/{length}"


def test_an_environment_that_is_too_old_is_short_of_its_share_by_so_much() -> None:
    (words,) = shortfalls([line(fast=700, slow=200), line(fast=435, slow=340, stale=595)]).values()
    assert "slow is 32% of what is trained, where its ratio says 50%" in words
    assert "595 of its 1135 rollouts" in words


@pytest.mark.parametrize(
    "counts",
    [
        {"fast": 500, "slow": 480, "stale": 300},  # it was made up for
        {"fast": 500, "slow": 200, "stale": 20},  # its groups are filtered, not too old
        {"fast": 20, "slow": 5, "stale": 20},  # too few to say
        {},
    ],
)
def test_whoever_has_his_share_is_not_named(counts: dict[str, int]) -> None:
    assert shortfalls([line(**counts)]) == {}
    assert shortfalls([]) == {}


def test_the_only_environment_has_no_share_to_be_short_of() -> None:
    counts = {"trained/only/8-16s": 100, "stale/only/8-16s": 900}
    assert shortfalls([{"examples/only/share": 1.0} | counts]) == {}


def test_lengths_that_are_too_old_more_often() -> None:
    counts = {"trained/only/1-2s": 300, "trained/only/2-4s": 190, "stale/only/2-4s": 10, "trained/only/8-16s": 60}
    counts |= {"stale/only/8-16s": 60, "stale/only/16-32s": 20, "stale/only/unknown": 500}
    (words,) = shortfalls([{"examples/only/share": 1.0} | counts]).values()
    assert "only" in words
    assert "57% of those that took 8 s or longer were too old, 2% of the shorter ones" in words
    few = {name: count * LEAST_ROLLOUTS // 700 for name, count in counts.items()}
    assert shortfalls([few]) == {}


def test_it_is_said_once_and_of_the_present_ratios(caplog: pytest.LogCaptureFixture) -> None:
    log = ShortfallLog()
    with caplog.at_level(logging.WARNING):
        log.take(line(fast=70, slow=20, stale=40))
        assert not caplog.records, "it may be made up for yet"
        for _ in range(2 * LEAST_STEPS):
            log.take(line(fast=70, slow=20, stale=40))
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        caplog.clear()
        other = {"examples/fast/share": 0.8, "examples/slow/share": 0.2}
        log = ShortfallLog()
        log.take(line(fast=700, slow=10, stale=700, **other))
        for _ in range(LEAST_STEPS):
            log.take(line(fast=50, slow=50, stale=30))
    assert not caplog.records
