"""Rows: what a file holds is what is read, whichever format; what is wrong is named by file and line."""

from __future__ import annotations

import gzip
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.environments.data import json_lines
from counterpoint.environments.data.load import load_rows
from counterpoint.environments.data.rows import DataError

WRITTEN = [{"question": f"{n} + 1", "answer": n + 1, "tags": ["sum", str(n)]} for n in range(10)]


def write_lines(path: Path, rows: list[Any], end: str = "\n") -> Path:
    path.write_text("".join(json.dumps(row) + end for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]], row_group_size: int = 3) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


def test_json_lines_are_read_as_written(tmp_path: Path) -> None:
    rows = load_rows({"path": str(write_lines(tmp_path / "some.jsonl", WRITTEN))})
    assert list(rows) == WRITTEN
    assert (rows[-1], len(rows[2:5]), rows.where(4)) == (WRITTEN[-1], 3, f"{tmp_path}/some.jsonl:5")
    with pytest.raises(IndexError):
        rows[10]


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.lists(st.dictionaries(st.text(max_size=5), values, max_size=3), min_size=1, max_size=8), st.data())
def test_blank_lines_and_ends_of_lines_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("lines") / "some.jsonl"
    text, numbers = b"", []
    for row in rows:
        text += data.draw(st.sampled_from([b"", b"\n", b"\r\n", b" \n\n"]))
        numbers.append(text.count(b"\n") + 1)
        text += orjson.dumps(row) + data.draw(st.sampled_from([b"\n", b"\r\n"]))
    path.write_bytes(text if data.draw(st.booleans()) else text.rstrip(b"\r\n"))
    loaded = load_rows({"path": str(path)})
    assert list(loaded) == rows
    assert [loaded.where(index) for index in range(len(rows))] == [f"{path}:{number}" for number in numbers]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    for text, rows in (('{"a": 1}\n{"a": 2}\n', [{"a": 1}, {"a": 2}]), ('\n{"a": 1}', [{"a": 1}])):
        path = tmp_path / "marked.jsonl"
        path.write_text(text, encoding="utf-8-sig")
        found = load_rows({"path": str(path)})
        assert list(found) == rows
        assert found.where(0) == f"{path}:{text[: text.index('{')].count(chr(10)) + 1}"
    path.write_text("", encoding="utf-8-sig")
    with pytest.raises(DataError, match="holds no row"):
        load_rows({"path": str(path)})


def test_lines_across_pieces_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines(tmp_path / "some.jsonl", WRITTEN)
    whole = load_rows({"path": str(path)}).fingerprint
    for size in range(1, 40):
        monkeypatch.setattr("counterpoint.environments.data.files.CHUNK_BYTES", size)
        rows = load_rows({"path": str(path)})
        assert list(rows) == WRITTEN
        assert rows.fingerprint == whole


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1}\n{"a": 2\n', r"some\.jsonl:2: this is not JSON"),
        ('{"a": 1}\n\n[1]\n', r"some\.jsonl:3: it is a list; expected an object"),
        ('{"a": NaN}\n', r"some\.jsonl:1: this is not JSON"),
        (
            '{"a": 1}\n{"a": "' + "x" * 10_000 + '"}\n',
            r"some\.jsonl:2: it has 10010 bytes; .* max_row_bytes = 10000",
        ),
        ('{"a": 1}\n{"a": ' + "9" * 5000 + "}\n", r"some\.jsonl:2: a number is out of range: .* 4300 digits"),
        ('{"a": 1}\n{"a": 1e999}\n', r"some\.jsonl:2: a number is out of range"),
        ('{"a": ' + "[" * 201 + "]" * 201 + "}\n", r"some\.jsonl:1: .*more than 200 deep"),
        ('{"a": ' + "[" * 9000 + "}\n", r"some\.jsonl:1: .*more than 200 deep"),
        ("", "holds no row"),
        ("\n\n", "holds no row"),
    ],
)
def test_what_is_wrong_with_a_line_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=said):
        load_rows({"path": str(path), "max_row_bytes": 10_000})


def test_a_bad_line_far_down_is_named_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "_CHECKED_ROWS", 2)
    path = tmp_path / "some.jsonl"
    path.write_text('{"a": 1}\n' * 5 + "oops\n")
    rows = load_rows({"path": str(path)})
    with pytest.raises(DataError, match=r"some\.jsonl:6: this is not JSON"):
        rows[5]


def test_a_file_that_is_replaced_meanwhile_changes_nothing(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "some.jsonl", WRITTEN)
    rows = load_rows({"path": str(path)})
    write_lines(tmp_path / "other.jsonl", [{"a": 1}]).replace(path)
    assert list(rows) == WRITTEN


def test_a_file_is_closed_with_its_rows(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "some.jsonl", WRITTEN)
    rows = load_rows({"path": str(path)})
    assert descriptors_of(path) == 1
    del rows
    assert descriptors_of(path) == 0


def descriptors_of(path: Path) -> int:
    """How many descriptors of this process are open on `path`."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}") == str(path)
    return found


def test_columns_are_renamed_and_a_missing_one_is_named(tmp_path: Path) -> None:
    path = str(write_lines(tmp_path / "some.jsonl", [*WRITTEN, {"question": "?"}]))
    columns = {"prompt": "question", "solution": "answer"}
    rows = load_rows({"path": path, "columns": columns})
    assert rows[3] == {"prompt": "3 + 1", "solution": 4}
    with pytest.raises(DataError, match=r"some\.jsonl:11: .*'answer'\. It has 'question'"):
        rows[10]
    with pytest.raises(DataError, match=r"jsonl:1: .*column 'questions'; .*'question'\?"):
        load_rows({"path": path, "columns": {"prompt": "questions"}})


def test_a_column_has_the_weights(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "some.jsonl", [{"a": n, "w": n / 2} for n in range(6)])
    rows = load_rows({"path": str(path), "columns": {"b": "a"}, "weight": "w", "select": "::2"})
    assert list(rows) == [{"b": 0}, {"b": 2}, {"b": 4}]
    assert rows.weights is not None
    assert rows.weights.tolist() == [0, 1, 2]
    assert load_rows({"path": str(path)}).weights is None
    for row, said in (
        ({"a": 1}, r"some\.jsonl:7: there is no column 'w'\. It has 'a' \(`weight`\)"),
        ({"a": 1, "w": "2"}, r"some\.jsonl:7: the weight 'w' is '2'; expected a number, 0 or more"),
        ({"a": 1, "w": -1}, r"the weight 'w' is -1"),
    ):
        path.write_text("".join(json.dumps({"a": n, "w": 1}) + "\n" for n in range(6)) + json.dumps(row) + "\n")
        with pytest.raises(DataError, match=said):
            load_rows({"path": str(path), "weight": "w"})


@pytest.mark.parametrize("select", [":", "2:", ":-1", "::3", "1:9:2"])
def test_select_is_a_slice(select: str) -> None:
    bounds = [int(part) if part else None for part in select.split(":")]
    rows = load_rows({"rows": WRITTEN, "select": select})
    assert list(rows) == WRITTEN[slice(*bounds)]
    assert rows.where(0) == f"rows[{range(10)[slice(*bounds)][0]}]"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "no source: expected exactly one of path, dataset and rows"),
        ({"rows": [{}], "path": "x.jsonl"}, "path and rows: expected exactly one"),
        ({"path": "x.jsonl", "split": "test"}, "split belongs to a dataset; for path, use select"),
        ({"rows": [{}], "select": "first"}, "data.select: 'first' is not a slice"),
        ({"rows": [{}], "select": "::-1"}, "'::-1' is not a slice"),
        ({"rows": [{}], "select": "5:"}, "select = '5:' leaves no row of 1"),
        ({"rows": []}, "rows holds no row"),
        ({"rows": [{}], "shuffle": True}, "data.shuffle: unknown key; valid: columns, dataset, "),
        ({"path": "nowhere.jsonl"}, "nowhere.jsonl: No such file"),
        ({"path": "nowhere/*.jsonl"}, "no file matches path = 'nowhere/\\*.jsonl'"),
        ({"path": "some.csv"}, "the name ends with none of .jsonl"),
        ({"path": "/dev/null.jsonl"}, "No such file"),
    ],
)
def test_what_is_wrong_with_the_configuration_is_named(data: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        load_rows(data)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, suffix: str) -> None:
    os.mkfifo(tmp_path / f"pipe.{suffix}")
    with pytest.raises(DataError, match="is not a regular file"):
        load_rows({"path": str(tmp_path / f"pipe.{suffix}")})


def test_a_pattern_joins_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    write_lines(tmp_path / "b.jsonl", WRITTEN[4:])
    write_lines(tmp_path / "a.jsonl", WRITTEN[:4])
    rows = load_rows({"path": f"{tmp_path}/*.jsonl"})
    assert list(rows) == WRITTEN
    assert (rows.where(3), rows.where(4)) == (f"{tmp_path}/a.jsonl:4", f"{tmp_path}/b.jsonl:1")


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "some.jsonl", WRITTEN)
    same = write_lines(tmp_path / "same.jsonl", WRITTEN)
    known = load_rows({"path": str(path)}).fingerprint
    assert load_rows({"path": str(same)}).fingerprint == known
    assert load_rows({"path": str(path), "select": "1:"}).fingerprint != known
    assert load_rows({"path": str(path), "columns": {"a": "answer"}}).fingerprint != known
    write_lines(path, [*WRITTEN, {}])
    assert load_rows({"path": str(path)}).fingerprint != known
    one, other = load_rows({"rows": WRITTEN}), load_rows({"rows": WRITTEN[::-1]})
    assert one.fingerprint != other.fingerprint


@pytest.mark.slow
def test_parquet_is_read_by_row_groups(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "some.parquet", WRITTEN)
    rows = load_rows({"path": str(path)})
    assert list(rows) == WRITTEN
    assert rows.where(4) == f"{path}, row 4"
    assert list(load_rows({"path": str(path), "columns": {"a": "answer"}, "select": "8:"})) == [{"a": 9}, {"a": 10}]
    weighted = load_rows({"path": str(path), "columns": {"q": "question"}, "weight": "answer", "select": "8:"})
    assert weighted.weights is not None
    assert (list(weighted), weighted.weights.tolist()) == ([{"q": "8 + 1"}, {"q": "9 + 1"}], [9, 10])
    with pytest.raises(DataError, match=r"some\.parquet: .*'anwser'; .*'answer'\?"):
        load_rows({"path": str(path), "columns": {"a": "anwser"}})
    with pytest.raises(DataError, match=r"some\.parquet, row 0: it has \d+ bytes; .* max_row_bytes = 8"):
        load_rows({"path": str(path), "max_row_bytes": 8})
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"some\.parquet cannot be read as Parquet"):
        load_rows({"path": str(path)})


@pytest.mark.slow
def test_parquet_of_many_batches(tmp_path: Path) -> None:
    rows = load_rows({"path": str(write_parquet(tmp_path / "m.parquet", [{"n": n} for n in range(5000)], 700))})
    assert [row["n"] for row in rows] == list(range(5000))


def test_the_extra_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("pyarrow", "datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "some.parquet").write_bytes(b"")
    for data in ({"path": str(tmp_path / "some.parquet")}, {"dataset": "openai/gsm8k"}):
        with pytest.raises(DataError, match=r"pip install 'counterpoint\[datasets\]'"):
            load_rows(data)


@pytest.mark.slow
def test_a_dataset_of_a_directory(tmp_path: Path) -> None:
    import datasets

    train, test = datasets.Dataset.from_list(WRITTEN), datasets.Dataset.from_list(WRITTEN[:2])
    datasets.DatasetDict(train=train, test=test).save_to_disk(tmp_path / "both")
    train.save_to_disk(tmp_path / "one")
    for directory, split, expected in (("both", None, WRITTEN), ("both", "test", WRITTEN[:2]), ("one", None, WRITTEN)):
        rows = load_rows({"dataset": str(tmp_path / directory), "split": split})
        assert list(rows) == expected
    both = load_rows({"dataset": str(tmp_path / "both"), "columns": {"a": "answer"}, "select": "::5"})
    assert list(both) == [{"a": 1}, {"a": 6}]
    assert both.where(1) == f"dataset {tmp_path / 'both'}, row 5"
    assert (
        both.fingerprint
        == load_rows({"dataset": str(tmp_path / "one"), "columns": {"a": "answer"}, "select": "::5"}).fingerprint
    )
    for data, said in (
        ({"split": "dev"}, "has no split 'dev'; it has 'train', 'test'"),
        ({"columns": {"a": "answers"}}, "there is no column 'answers'; did you mean 'answer'"),
        ({"max_row_bytes": 8}, r"row 0: it has \d+ bytes"),
    ):
        with pytest.raises(DataError, match=said):
            load_rows({"dataset": str(tmp_path / "both"), **data})
    with pytest.raises(DataError, match=r"was saved as one split; leave out split = 'train'"):
        load_rows({"dataset": str(tmp_path / "one"), "split": "train"})


MIXED: list[dict[str, Any]] = [
    {
        "answer": "six",
        "tools": [{"name": "f", "parameters": {"properties": {"x": {"type": "string"}}, "required": ["x"]}}],
        "tests": [{"args": [1, [2, None]], "expected": {"a": 1}}],
        "messages": [{"role": "user", "content": "a", "calls": None}],
        "plain": '"quoted"',
        "inside": {"deep": {"value": 1.5, "other": 3}},
    },
    {
        "answer": 5,
        "tools": [{"name": "g", "parameters": {"properties": {"y": {"enum": [1, "b"]}}, "required": []}}],
        "tests": [{"args": ["a", {"b": []}], "expected": None}, {"args": [], "expected": True}],
        "messages": [
            {"role": "assistant", "content": "b", "calls": [{"arguments": {"p": 1}}, {"arguments": {"q": "2"}}]}
        ],
        "plain": "5",
        "inside": {"deep": {"value": "1.5", "other": 4}},
    },
    {
        "answer": None,
        "tools": None,
        "tests": [],
        "messages": [],
        "plain": None,
        "inside": {"deep": {"value": [[1], None], "other": 5}},
    },
    {
        "answer": [1, "null", {"b": -0.25}],
        "tools": [],
        "tests": [{"args": None, "expected": ""}],
        "messages": [{"role": "user", "content": "", "calls": []}],
        "plain": "{}",
        "inside": None,
    },
    {
        "answer": "5",
        "tools": [],
        "tests": [],
        "messages": [],
        "plain": "",
        "inside": {"deep": {"value": "true", "other": 6}},
    },
]
"""Rows whose columns hold values of several types, and of which `datasets` reads some otherwise than they are written."""


@pytest.mark.slow
@pytest.mark.parametrize("columns", [{}, {"a": "answer", "t": "tools"}])
def test_columns_of_several_types_are_what_datasets_returns(tmp_path: Path, columns: dict[str, str]) -> None:
    import datasets

    made = datasets.Dataset.from_list(MIXED, on_mixed_types="use_json")
    made.save_to_disk(tmp_path / "saved")
    made.to_parquet(tmp_path / "mixed.parquet")
    (tmp_path / "lines").mkdir()
    write_lines(tmp_path / "lines" / "train.jsonl", MIXED)
    (tmp_path / "loadable").mkdir()
    made.to_parquet(tmp_path / "loadable" / "train.parquet")
    assert made[0] == MIXED[0]
    assert made[4]["answer"] == 5
    for data, expected in (
        ({"dataset": str(tmp_path / "saved")}, made),
        ({"path": str(tmp_path / "mixed.parquet")}, made),
        ({"dataset": str(tmp_path / "loadable")}, made),
        ({"dataset": str(tmp_path / "lines")}, MIXED),
        ({"path": str(tmp_path / "lines" / "train.jsonl")}, MIXED),
    ):
        rows = list(load_rows({**data, "columns": columns}))
        chosen = columns or {name: name for name in MIXED[0]}
        assert rows == [{name: row[column] for name, column in chosen.items()} for row in expected], data


def test_json_of_parquet_is_read_whoever_wrote_the_file(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    texts = ["1180591620717411303425", '"six"', None, '{"a": [1]}', "NaN"]
    noted = {b"huggingface": json.dumps({"info": {"features": {"a": {"_type": "Json"}}}})}
    plain = pyarrow.table({"a": pyarrow.array(texts, pyarrow.string())})
    for number, table in enumerate(
        (
            pyarrow.table({"a": pyarrow.array(texts, pyarrow.json_())}),
            plain.replace_schema_metadata(noted),
            pyarrow.table({"a": pyarrow.array(texts, pyarrow.json_())}).replace_schema_metadata({b"huggingface": b"{"}),
        )
    ):
        pyarrow.parquet.write_table(table, path := tmp_path / f"{number}.parquet")
        rows = load_rows({"path": str(path)})
        assert [rows[index]["a"] for index in range(4)] == [2**70 + 1, "six", None, {"a": [1]}]
        with pytest.raises(DataError, match=r"parquet, row 4: the column 'a': this is not JSON"):
            rows[4]
    as_text = json.dumps({"info": {"features": {"a": {"_type": "Json", "decode": False}}}})
    for table in (plain, plain.replace_schema_metadata({b"huggingface": as_text})):
        pyarrow.parquet.write_table(table, tmp_path / "text.parquet")
        assert load_rows({"path": str(tmp_path / "text.parquet")})[1] == {"a": '"six"'}


GUESSED: list[dict[str, Any]] = [
    {"a": 7, "deep": {"b": [{"c": 4}, {"c": 2**70 + 1}]}, "day": "2024-01-02", "unit": 1.0, "tests": [[3], [4]]},
    {
        "a": 2.5,
        "deep": {"b": [{"c": 0.5}]},
        "day": "2024-12-31",
        "unit": 0.5,
        "tests": [[0.25]],
        "late": "2024-01-02T03:04:05",
    },
    {"a": None, "deep": {"b": []}, "day": "2025-02-28", "unit": 0.0, "tests": [], "late": 7},
]
"""Rows that `datasets` reads otherwise than they are written: integers as floats, texts as timestamps, absent as null."""


@pytest.mark.slow
def test_json_of_a_directory_is_read_as_it_is_written(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in GUESSED)
    forms = {
        "lines/train.jsonl": lines.encode(),
        "array/train.json": b"\n" + json.dumps(GUESSED, indent=1).encode(),
        "packed/train.jsonl.gz": gzip.compress(lines.encode()),
        "split/train-00000.jsonl": lines.encode().splitlines(keepends=True)[0],
        "split/train-00001.jsonl": b"".join(lines.encode().splitlines(keepends=True)[1:]),
    }
    for name, content in forms.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    for name in {each.split("/")[0] for each in forms}:
        rows = load_rows({"dataset": str(tmp_path / name)})
        assert exactly(list(rows)) == exactly(GUESSED), name
    assert load_rows({"dataset": str(tmp_path / "lines")}).where(1) == f"{tmp_path}/lines/train.jsonl:2"
    assert load_rows({"path": str(tmp_path / "array/train.json")}).where(1) == f"{tmp_path}/array/train.json, row 1"


def exactly(rows: list[Any]) -> str:
    """A text that tells 7 from 7.0."""
    return json.dumps(rows, sort_keys=True)


@pytest.mark.slow
def test_splits_of_json_are_those_of_datasets(tmp_path: Path) -> None:
    import datasets

    (data := tmp_path / "data").mkdir()
    for split, count in (("train", 110), ("test", 7)):
        write_lines(data / f"{split}.jsonl", [{"n": f"{split}{n}"} for n in range(count)])
    for spec in (
        "train",
        "test",
        "train[:25%]",
        "test[-2:]",
        "train[2:4]+test[:50%]",
        "train[33%:66%](pct1_dropremainder)",
        "all",
    ):
        expected = datasets.load_dataset(str(data), split=spec, cache_dir=str(tmp_path / "cache"))
        assert list(load_rows({"dataset": str(data), "split": spec})) == list(expected), spec
    for spec in ("dev", "train+dev", "train[:"):
        with pytest.raises(DataError, match="split"):
            load_rows({"dataset": str(data), "split": spec})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"a": 1}, 2]', r"a\.json, row 1: it is a int; expected an object"),
        ('[{"a": 1}] [', r"a\.json begins as a JSON array, and is none"),
        ('[{"a": 1}, {"b": ', r"a\.json begins as a JSON array, and is none"),
        ('[{"a": 1}, {"b": "' + "x" * 200 + '"}]', r"a\.json, row 1: it has 209 bytes"),
        (" [ ] ", "holds no row"),
    ],
)
def test_what_is_wrong_with_an_array_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=said):
        load_rows({"path": str(tmp_path / "a.json"), "max_row_bytes": 100})


def test_an_array_after_blanks_and_a_mark(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(" " * 5000 + '\n[{"a": 2.50},\n\n {"a": "é"}\n]\n', encoding="utf-8-sig")
    rows = load_rows({"path": str(tmp_path / "a.json")})
    assert (str(rows[0]["a"]), rows[1], len(rows)) == ("2.50", {"a": "é"}, 2)


@pytest.mark.slow
def test_values_of_csv_are_text(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text('id,a,b,day\n007,7,NA,2024-01-02\n8,2.50,true,"a, b"\n9,,1e3,\n')
    rows = list(load_rows({"dataset": str(tmp_path)}))
    assert rows == [
        {"id": "007", "a": "7", "b": "NA", "day": "2024-01-02"},
        {"id": "8", "a": "2.50", "b": "true", "day": "a, b"},
        {"id": "9", "a": "", "b": "1e3", "day": ""},
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a.csv": "id,a\n7,x,y\n8,z,w\n"}, "a.csv: its first row has more values"),
        ({"a.csv": "id,a\n7,x\n", "b.csv": "id,a,b\n8,y,z\n"}, "the columns .*'b'.*, and .*a.csv has"),
        ({"a.csv": "id,a\n7,x\n8,y,z\n"}, "Expected 2 fields in line 3, saw 3"),
        ({"a.png": "", "metadata.csv": "file_name,a\na.png,007\n"}, "metadata.csv .*'007' would be 7"),
    ],
)
def test_values_that_pandas_would_leave_out_or_guess_are_refused(
    tmp_path: Path, files: dict[str, str], said: str
) -> None:
    for name, text in files.items():
        (tmp_path / "train").mkdir(exist_ok=True)
        (tmp_path / "train" / name).write_text(text)
    with pytest.raises(DataError, match=f"(?s){said}"):
        load_rows({"dataset": str(tmp_path)})


@pytest.mark.slow
def test_what_datasets_has_guessed_before_is_refused(tmp_path: Path) -> None:
    import datasets

    write_lines(
        tmp_path / "train.jsonl", [{"a": {"b": [7]}, "day": "2024-01-02"}, {"a": {"b": [2.5]}, "day": "2024-01-03"}]
    )
    loaded = datasets.load_dataset("json", data_files=str(tmp_path / "train.jsonl"), cache_dir=str(tmp_path / "cache"))
    loaded.save_to_disk(tmp_path / "saved")
    data = {"dataset": str(tmp_path / "saved")}
    with pytest.raises(DataError, match=r"column 'day' of json files timestamp"):
        load_rows(data)
    with pytest.raises(DataError, match=r"row 0: .* json files as 7\.0, which may be an integer"):
        load_rows({**data, "columns": {"a": "a"}})
    assert load_rows({**data, "columns": {"a": "a"}, "select": "1:"})[0] == {"a": {"b": [2.5]}}


@pytest.mark.slow
def test_a_dataset_of_the_hub_is_pinned_and_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []

    datasets.Dataset.from_list(WRITTEN).to_parquet(tmp_path / "test.parquet")
    real = datasets.load_dataset_builder

    def load(**keywords: Any) -> Any:
        asked.append(keywords)
        if len(asked) > 1:
            raise ConnectionError("no route to the hub")
        return real(str(tmp_path), cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset_builder", load)
    data = {"dataset": "openai/gsm8k", "subset": "main", "revision": "e53f048", "split": "test"}
    assert list(load_rows(data)) == WRITTEN
    assert asked == [{"path": "openai/gsm8k", "name": "main", "revision": "e53f048"}]
    with pytest.raises(DataError, match=r"gsm8k, split 'test', .*: ConnectionError: no route to the hub"):
        load_rows(data)
