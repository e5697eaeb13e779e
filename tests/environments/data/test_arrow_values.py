"""Each type of Arrow and of `datasets` is read by the table, in Parquet and in saved datasets, at any depth."""

from __future__ import annotations

import datetime as dt
import json
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.data.load import load_rows
from counterpoint.environments.data.rows import DataError, unwritable

pyarrow = pytest.importorskip("pyarrow")
ID = uuid.UUID("12345678-1234-5678-1234-567812345678")
LATE = dt.datetime(2024, 1, 2, 3, 4, 5, 600000)
pa: Any = pyarrow

TYPES: dict[str, tuple[Any, Any, Any]] = {
    # type, a value as it is written, what a row has
    "null": (pa.null(), None, None),
    "bool": (pa.bool_(), True, True),
    "int8": (pa.int8(), -7, -7),
    "uint64": (pa.uint64(), 2**64 - 1, 2**64 - 1),
    "float16": (pa.float16(), 0.1, 0.1),
    "float32": (pa.float32(), 0.1, 0.1),
    "float32 whole": (pa.float32(), 16777216.0, 16777216.0),
    "float32 whole number of more digits": (pa.float32(), 123456792.0, 123456792.0),
    "float16 whole": (pa.float16(), 65504.0, 65504.0),
    "float32 large": (pa.float32(), 1e30, 1e30),
    "float64": (pa.float64(), 0.1, 0.1),
    "decimal32": (pa.decimal32(5, 2), Decimal("2.50"), "2.50"),
    "decimal64": (pa.decimal64(12, 0), Decimal(7), 7),
    "decimal128": (pa.decimal128(38, 2), Decimal("123456789012345678901234.50"), "123456789012345678901234.50"),
    "decimal256": (pa.decimal256(60, 0), Decimal(2**150), 2**150),
    "text": (pa.string(), "2024-01-02", "2024-01-02"),
    "large text": (pa.large_string(), "é", "é"),
    "text view": (pa.string_view(), "é", "é"),
    "date32": (pa.date32(), dt.date(2024, 1, 2), "2024-01-02"),
    "date64": (pa.date64(), dt.date(2024, 1, 2), "2024-01-02"),
    "time32": (pa.time32("s"), dt.time(3, 4, 5), "03:04:05"),
    "time64": (pa.time64("us"), dt.time(3, 4, 5, 600), "03:04:05.000600"),
    "timestamp": (pa.timestamp("us"), LATE, "2024-01-02T03:04:05.600000"),
    "timestamp of a zone": (
        pa.timestamp("ms", "Asia/Kolkata"),
        LATE.replace(tzinfo=dt.UTC),
        "2024-01-02T08:34:05.600000+05:30",
    ),
    "nanoseconds": (pa.timestamp("ns"), 1, "1970-01-01T00:00:00.000000001"),
    "uuid": (pa.uuid(), ID.bytes, str(ID)),
    "json": (pa.json_(), '{"a": [7, 2.5]}', {"a": [7, 2.5]}),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), "a", "a"),
    "list": (pa.list_(pa.float32()), [0.1, None], [0.1, None]),
    "large list": (pa.large_list(pa.date32()), [dt.date(2024, 1, 2)], ["2024-01-02"]),
    "fixed list": (pa.list_(pa.float32(), 2), [0.1, 7], [0.1, 7.0]),
    "list view": (pa.list_view(pa.decimal128(9, 2)), [Decimal("0.10")], [0.1]),
    "struct": (
        pa.struct({"a": pa.list_(pa.struct({"b": pa.float32(), "c": pa.date32()}))}),
        {"a": [{"b": 0.1, "c": None}, None]},
        {"a": [{"b": 0.1, "c": None}, None]},
    ),
    "map": (pa.map_(pa.string(), pa.float32()), [("x", 0.1), ("y", None)], {"x": 0.1, "y": None}),
    "map of numbers": (pa.map_(pa.int8(), pa.date32()), [(1, dt.date(2024, 1, 2))], [[1, "2024-01-02"]]),
}
KEPT: dict[str, tuple[Any, Any]] = {
    "bytes": (pa.binary(), b"x"),
    "large bytes": (pa.large_binary(), b"x"),
    "fixed bytes": (pa.binary(2), b"xy"),
    "bytes view": (pa.binary_view(), b"x"),
    "duration": (pa.duration("ms"), dt.timedelta(seconds=5)),
    "list of bytes": (pa.list_(pa.binary()), [b"x"]),
}


def column(kind: Any, value: Any) -> Any:
    storage = getattr(kind, "storage_type", None)
    if storage is not None:
        return pa.ExtensionArray.from_storage(kind, pa.array([value, None], storage))
    return pa.array([value, None], kind)


def written(value: Any) -> str:
    """As a prompt has it: a decimal that is a column by its own text, 7 apart from 7.0."""
    return str(value) if isinstance(value, str) or type(value) not in (list, dict) else json.dumps(value)


@pytest.mark.parametrize("name", TYPES)
def test_a_type_is_read_by_the_table(tmp_path: Path, name: str) -> None:
    import pyarrow.parquet

    kind, value, expected = TYPES[name]
    table = pa.table({"a": column(kind, value)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    rows = load_rows({"path": str(tmp_path / "a.parquet")})
    assert written(rows[0]["a"]) == written(expected)
    assert rows[1] == {"a": None}
    assert unwritable(rows[0]["a"]) == ""


@pytest.mark.parametrize("name", KEPT)
def test_what_json_has_not_is_pythons_own(tmp_path: Path, name: str) -> None:
    import pyarrow.parquet

    kind, value = KEPT[name]
    pyarrow.parquet.write_table(pa.table({"a": column(kind, value)}), tmp_path / "a.parquet")
    row = load_rows({"path": str(tmp_path / "a.parquet")})[0]
    assert row == {"a": value}
    assert unwritable(row) in ("bytes", "timedelta")


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (pa.array([[("x", 1), ("x", 2)]], pa.map_(pa.string(), pa.int8())), "column 'a': a map has a key twice"),
        (
            pa.array([[Decimal("0.12345678901234567890")]], pa.list_(pa.decimal128(38, 20))),
            "column 'a': .*make it text",
        ),
        (pa.array([2**55], pa.timestamp("ms")), "row 0: it cannot be read"),
        (pa.array([1], pa.time64("ns")), "column 'a': its type time64.* is not read"),
        (
            pa.ExtensionArray.from_storage(
                pa.fixed_shape_tensor(pa.float32(), [2]), pa.array([[0.1, 2]], pa.list_(pa.float32(), 2))
            ),
            "column 'a': its type .*fixed_shape_tensor.* is not read",
        ),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, array: Any, said: str) -> None:
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({"a": array, "b": [1]}), tmp_path / "a.parquet")
    data = {"path": str(tmp_path / "a.parquet")}
    with pytest.raises(DataError, match=said):
        load_rows(data)
    assert load_rows({**data, "columns": {"b": "b"}})[0] == {"b": 1}


@pytest.mark.slow
def test_features_of_datasets_are_read_by_the_table(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        {
            "label": datasets.ClassLabel(names=["no", "yes"]),
            "grid": datasets.Array2D((1, 2), "float32"),
            "each": datasets.Sequence({"x": datasets.Value("float32")}),
            "large": datasets.LargeList(datasets.Value("date32")),
            "json": datasets.List(datasets.Json()),
            "image": datasets.Image(),
            "images": datasets.List(datasets.Image()),
        }
    )
    image = {"bytes": b"\x89PNG", "path": "a.png"}
    row = {
        "label": "yes",
        "grid": [[0.1, 2.0]],
        "each": {"x": [0.1]},
        "large": [dt.date(2024, 1, 2)],
        "json": [7, 2.5, "2024-01-02"],
        "image": image,
        "images": [image],
    }
    made = datasets.Dataset.from_list([row], features=features)
    made.save_to_disk(tmp_path / "saved")
    made.to_parquet(tmp_path / "a.parquet")
    for data in ({"dataset": str(tmp_path / "saved")}, {"path": str(tmp_path / "a.parquet")}):
        found = dict(load_rows(data)[0])
        assert (unwritable(found["image"]), unwritable(found.pop("images"))) == ("Media", "Media")
        assert found.pop("image") == image
        expected = row | {"label": 1, "large": ["2024-01-02"]}
        assert found == {name: expected[name] for name in found}, data
