"""The right answer of an example, as records have it: whatever an author's class holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from counterpoint.environments.base import LONGEST_ANSWER, Example, answer_of
from tests.support.growth import CONSTANT, assert_growth


class _Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ("four", "four"), ("", None), (None, None), (4, "4"), (["a", 1], "['a', 1]"), ("\ud800", "\\ud800"),
        ("x" * 5000, "x" * (LONGEST_ANSWER - 1) + "…"),
    ],
)  # fmt: skip
def test_an_answer_is_a_text_of_bounded_length(answer: Any, shown: str | None) -> None:
    assert answer_of(Example(0, "two and two", answer)) == shown


@pytest.mark.parametrize(
    "make",
    [
        lambda size: _Unprintable(), lambda size: [*range(10 * size)], lambda size: {"x": "y" * 100 * size},
        lambda size: [[[[[[[[1]]]]]]]], lambda size: "\ud800" * 100 * size, lambda size: bytes(size * 1000),
        lambda size: [[[[*range(size)]] * size] * size] * size,
    ],
)  # fmt: skip
def test_an_answer_of_any_kind_is_short_and_takes_the_same_time_whatever_its_size(make: Callable[[int], Any]) -> None:
    shown = answer_of(Example(0, "", make(1000)))
    assert shown is not None
    assert len(shown) <= LONGEST_ANSWER
    assert_growth(make, lambda answer: answer_of(Example(0, "", answer)), 1000, CONSTANT)


def test_a_number_that_python_writes_no_more_fails_no_rollout() -> None:
    assert answer_of(Example(0, "", 10**5000)) == "(it cannot be shown: ValueError)"  # type: ignore[arg-type]


def test_an_example_of_another_class_may_have_none() -> None:
    assert answer_of(object()) is None  # type: ignore[arg-type]
