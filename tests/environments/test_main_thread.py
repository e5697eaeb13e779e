"""Which code is seen to set alarms, and which is not."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from signal import alarm
from typing import Any

import math_verify
import pytest
from math_verify import parse

from counterpoint.environments.main_thread import NeedsMainThread, uses_signals, without_signals


def by_alarm() -> None:
    signal.alarm(1)


def by_name() -> None:
    alarm(1)


def by_another() -> None:
    by_alarm()


def within() -> Callable[[], None]:
    def inner() -> None:
        signal.setitimer(signal.ITIMER_REAL, 1)

    return inner


def by_library() -> Any:
    return parse("1")


def by_module() -> Any:
    return math_verify.parse("1")


def by_import() -> Any:
    import math_verify

    return math_verify.parse("1")


class ByMethod:
    @staticmethod
    def one() -> None:
        by_alarm()


def without_limits() -> Any:
    return math_verify.verify(parse("1", parsing_timeout=None), parse("1", parsing_timeout=None), timeout_seconds=None)


def reading_without_limits() -> Any:
    return parse("1", parsing_timeout=None)


def comparing_without_limits() -> Any:
    return math_verify.verify(reading_without_limits(), [1], timeout_seconds=None)


def half_without_limits() -> Any:
    return math_verify.verify(parse("1"), [1], timeout_seconds=None)


def of_another_kind() -> Any:
    return signal.SIGTERM, {"alarm": 1}["alarm"]


@pytest.mark.parametrize(
    "root",
    [by_alarm, by_name, by_another, within, by_library, by_module, by_import, ByMethod, half_without_limits],
)
def test_what_sets_alarms_is_seen(root: Any) -> None:
    with pytest.raises(NeedsMainThread, match=r"test_main_thread\.py:\d+.*do this"):
        uses_signals([root], "do this")


@pytest.mark.parametrize("root", [without_limits, comparing_without_limits, of_another_kind, len])
def test_what_sets_none_is_left_alone(root: Any) -> None:
    uses_signals([root], "do this")


async def test_a_handler_that_a_thread_cannot_set_is_told_whoever_catches_that() -> None:
    def caught() -> int:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        except ValueError:
            return 0
        return 1

    with pytest.raises(NeedsMainThread, match="do this"), without_signals("do this"):
        assert await asyncio.to_thread(caught) == 0
    with without_signals("do this"):
        assert caught() == 1
    assert await asyncio.to_thread(caught) == 0
