"""The right answer of an example, as records have it: whatever an author's class holds."""

from __future__ import annotations

import time
from typing import Any

import pytest

from counterpoint.environments.base import LONGEST_ANSWER, Example, answer_of


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
    "answer",
    [
        _Unprintable(), [*range(10**5)], {"x": "y" * 10**6}, [[[[[[[[1]]]]]]]], "\ud800" * 10**6, bytes(10**8),
        [[[[*range(50)]] * 50] * 50] * 50,
    ],
)  # fmt: skip
def test_an_answer_of_any_kind_is_short_and_quick(answer: Any) -> None:
    began = time.process_time()
    assert answer_of(Example(0, "", answer)) is not None
    assert time.process_time() - began < 0.1
    shown = answer_of(Example(0, "", answer))
    assert shown is not None
    assert len(shown) <= LONGEST_ANSWER


def test_a_number_that_python_writes_no_more_fails_no_rollout() -> None:
    assert answer_of(Example(0, "", 10**5000)) == "(it cannot be shown: ValueError)"  # type: ignore[arg-type]


def test_an_example_of_another_class_may_have_none() -> None:
    assert answer_of(object()) is None  # type: ignore[arg-type]
