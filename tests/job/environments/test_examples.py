"""The reading of an environment's examples before any is played."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from counterpoint.environments.base import Example
from counterpoint.job.environments.examples import MOST, fault_of_examples


class Rows:
    """Examples as `make` makes them."""

    def __init__(self, size: int, make: Callable[[int], Any]) -> None:
        self.size, self.make, self.read = size, make, list[int]()

    def __len__(self) -> int:
        return self.size

    def example(self, index: int) -> Any:
        self.read.append(index)
        return self.make(index)


def fault_of(rows: Rows) -> str | None:
    return fault_of_examples(rows, seconds=3600)  # type: ignore[arg-type]


@pytest.mark.parametrize("index", [lambda at: at, np.int64, lambda at: 7 * at + 3])
def test_any_whole_number_is_an_index(index: Callable[[int], Any]) -> None:
    rows = Rows(3, lambda at: Example(index(at), "prompt"))
    assert fault_of(rows) is None
    assert rows.read == [0, 1, 2]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda at: Example("1", "prompt"), "example 0 of 3: its index is '1'; expected a whole number"),  # type: ignore[arg-type]
        (lambda at: Example(at, None), "example 0 of 3: its prompt is NoneType ('None'); expected text"),  # type: ignore[arg-type]
        (lambda at: "row", "example 0 of 3: it is str; expected an Example"),
        (lambda at: [Example(at, "prompt")][at], "example 1 of 3 cannot be made: IndexError: list index out of range"),
    ],
)
def test_the_first_bad_example_is_named(make: Callable[[int], Any], said: str) -> None:
    assert (fault_of(Rows(3, make)) or "").startswith(said)


def test_of_very_many_examples_the_first_and_some_of_all_are_read() -> None:
    rows = Rows(2**40, lambda at: Example(at, "prompt"))
    assert fault_of(rows) is None
    assert len(set(rows.read)) == len(rows.read) == MOST
    assert rows.read == sorted(rows.read)
    assert rows.read[MOST // 2 - 1] == MOST // 2 - 1
    assert rows.read[-1] == 2**40 - 1
    just_more = Rows(MOST + 1, lambda at: Example(at, "prompt"))
    assert fault_of(just_more) is None
    assert just_more.read[-1] == MOST
