"""What JSON lacks is written as text, and everything else as orjson writes it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.transport.json_values import encode_values


@dataclass
class Move:
    """A part of some environment's state."""

    score: float
    name: str | None = None


def test_nan_and_infinities_are_text_and_null_is_null() -> None:
    state = {
        "worst": math.nan,
        "all": [1.5, math.inf, (-math.inf, None)],
        3: {"array": np.array([1.0, np.nan]), "whole": np.arange(2), "one": np.float32("inf"), "move": Move(math.nan)},
    }
    assert orjson.loads(encode_values(state)) == {
        "worst": "NaN",
        "all": [1.5, "Infinity", ["-Infinity", None]],
        "3": {"array": [1.0, "NaN"], "whole": [0, 1], "one": "Infinity", "move": {"score": "NaN", "name": None}},
    }
    with pytest.raises(TypeError):
        encode_values({"state": object()})


@dataclass
class Board:
    """A part of a state, with what is not to be written."""

    score: float
    _lock: object = field(default_factory=object)


@dataclass(slots=True)
class Cell(Board):
    """As `Board`, without a dictionary."""

    name: str = "a"


def test_of_a_dataclass_the_same_is_written_with_nan_and_without() -> None:
    unset = Board(1.0)
    unset.extra = None  # type: ignore[attr-defined]
    for value in (Board(1.0), Cell(1.0), unset):
        found, plain = encode_values([value, math.nan, None]), orjson.loads(encode_values(value))
        assert orjson.loads(found) == [plain, "NaN", None]


def test_long_integers_stand_beside_nan() -> None:
    state = {"n": 2**70, "list": [-(2**70), math.nan, {2**70: Move(2**70)}]}
    expected = {"n": 2**70, "list": [-(2**70), "NaN", {str(2**70): {"score": 2**70, "name": None}}]}
    assert json.loads(encode_values(state)) == expected


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
        lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=4), each, max_size=4),
        max_leaves=20,
    )
)
def test_finite_values_are_what_they_were(value: Any) -> None:
    assert orjson.loads(encode_values(value)) == value
