"""JSON is read and written with every integer as it is, and what is no JSON is refused in words."""

from __future__ import annotations

import copy
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.transport.exact_json import MAX_DEPTH, JsonError, WrittenDecimal, dumps, loads, read_row

LONG = 1180591620717411303425
"""2**70 + 1, which no float holds."""

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**60), 10**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=4), each, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_what_is_written_is_read_as_it_was(value: Any) -> None:
    data = dumps(value)
    assert loads(data) == json.loads(data) == value
    assert loads(data.decode()) == value
    assert [type(each) for each in loads(dumps([value, LONG, 2.0]))][1:] == [int, float]


@pytest.mark.parametrize("value", [2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, LONG, -LONG, 10**4000])
def test_integers_have_all_their_digits(value: int) -> None:
    assert loads(dumps({"a": [value, {"b": (value,)}]})) == {"a": [value, {"b": [value]}]}
    assert loads(dumps({value: 1}, option=orjson.OPT_NON_STR_KEYS)) == {str(value): 1}
    assert read_row(b'{"a": %d}' % value if value < 10**60 else dumps({"a": value})) == {"a": value}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"NaN", "not JSON"),
        (b"-Infinity", "not JSON"),
        (b"[1,]", "not JSON"),
        (b"01", "not JSON"),
        (b"1.", "not JSON"),
        (b"{'a': 1}", "not JSON"),
        (b"1 2", "not JSON"),
        (b"", "not JSON"),
        (b'"\\ud800"', "not JSON"),
        (b'"\xed\xa0\x80"', "not JSON"),
        (b"\xff", "not JSON"),
        ('"\ud800"', "not JSON"),
        (b"1e400", "out of range"),
        (b"9" * 10**6, "out of range"),
        (b"-" + b"9" * 10**6, "out of range"),
        (b"[" * (MAX_DEPTH + 1) + b"1" + b"]" * (MAX_DEPTH + 1), "512 deep"),
        (b'{"a":' * 10**5, "512 deep"),
        (b"[" * 10**6, "512 deep"),
    ],
)
def test_what_is_no_json_is_refused_in_words(data: bytes | str, said: str) -> None:
    with pytest.raises(JsonError, match=said):
        loads(data)


@pytest.mark.parametrize("text", ["2.50", "1.0", "1e3", "1E-7", "0.1", "-0.0", "3.14159265358979323846", "1.5e+300"])
def test_a_decimal_of_a_row_keeps_its_text_and_counts_as_a_float(text: str) -> None:
    row = read_row(b'{"a": %b, "list": [%b], "n": 2}' % (text.encode(), text.encode()))
    assert row == {"a": float(text), "list": [float(text)], "n": 2}
    for same in (row["a"], copy.deepcopy(row["a"])):
        assert (str(same), f"{same}") == (text, text)
    assert dumps(row["a"]) == text.encode()
    assert type(row["a"] + 1) is float
    assert isinstance(row["a"], WrittenDecimal) == (repr(float(text)) != text)


def test_what_json_cannot_hold_is_refused_also_beside_a_long_integer() -> None:
    for value in (object(), [LONG, object()], "\ud800"):
        with pytest.raises(TypeError):
            dumps(value)
    assert dumps([LONG, {1, 2}], default=sorted) == b"[%d,[1,2]]" % LONG
    for value in (10**4299, 1 - 10**4299):
        assert loads(dumps([value])) == [value]
    for value in (10**5000, 10**4300, -(10**4299)):
        with pytest.raises(TypeError, match="digits"):
            dumps([value])
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    around: dict[str, Any] = {"long": LONG}
    around["itself"] = around
    for value in ([LONG, deep], around):
        with pytest.raises(TypeError, match="deep"):
            dumps(value)
