from __future__ import annotations

import enum
import math
from typing import Any

import numpy as np
import pytest

from counterpoint.tune.errors import TuneError
from counterpoint.tune.json_values import as_json


class Kind(enum.StrEnum):
    A = "a"


class Named(str, enum.Enum):  # noqa: UP042 - `str` of a member is its name
    A = "a"


def test_scalars_of_other_libraries_become_pythons() -> None:
    given = {
        "float32": np.float32(0.5),
        "float64": np.float64(0.25),
        "int": np.int64(7),
        "bool": np.bool_(True),
        "array": np.array(3),
        "kind": Kind.A,
        "named": Named.A,
        Named.A: 0,
        "nested": [(1, 2.5), {"x": None}],
    }
    value = as_json(given, "the result", finite=False)
    assert value == {
        "float32": 0.5,
        "float64": 0.25,
        "int": 7,
        "bool": True,
        "array": 3,
        "kind": "a",
        "named": "a",
        "a": 0,
        "nested": [[1, 2.5], {"x": None}],
    }
    assert {type(each) for each in value.values()} == {float, int, bool, str, list}
    assert {type(key) for key in value} == {str}
    assert math.isnan(as_json(np.float32("nan"), "x", finite=False))


def circle() -> dict[str, Any]:
    it: dict[str, Any] = {}
    it["it"] = it
    return it


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), r"x: .* is a builtins.object"),
        ({"a": [1, {2}]}, r"x/a\[1\]: \{2\} is a builtins.set"),
        (np.zeros(3), r"x: .* is a numpy.ndarray"),
        ({1: 2}, r"x: the key 1 is of type int"),
        (2**70, r"x: an integer of more than 64 bits"),
        pytest.param(10**5000, r"x: an integer of more than 64 bits", id="longer than Python writes"),
        (b"bytes", r"x: b'bytes' is a builtins.bytes"),
        (circle(), r"or contains itself"),
    ],
)
def test_what_has_no_json_form_is_named(value: object, said: str) -> None:
    with pytest.raises(TuneError, match=said):
        as_json(value, "x", finite=False)
