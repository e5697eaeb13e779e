"""The index of a file of records: the same whatever portions it is read in, for any cut of the file and any bytes in it."""

from __future__ import annotations

import math
import os
import time
import tracemalloc
from pathlib import Path
from typing import get_args

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.environments.chat import Chat
from counterpoint.job.reading.rollouts import line_index, step_indexes
from counterpoint.job.reading.rollouts.line_index import StepIndex, record_in
from counterpoint.job.reading.rollouts.selection import RowFilter, Sort, histogram, select
from counterpoint.job.reading.rollouts.step_indexes import StepIndexes, moment
from counterpoint.transport.files.untrusted import UntrustedFileError
from tests.serve.rollouts.jobs import spoken, write_lines, write_step

RECORD = {"rollout_id": "1-0", "environment": "toy", "example_index": 4, "group_id": 1, "reward": 0.5, "turns": []}

LINES = st.lists(
    st.one_of(
        st.builds(lambda reward: orjson.dumps(RECORD | {"reward": reward}), st.floats(-1, 1) | st.none()),
        st.builds(lambda text: orjson.dumps(RECORD | {"error": text}), st.text(max_size=20)),
        st.binary(max_size=40).map(lambda data: data.replace(b"\n", b"")),
        st.sampled_from(
            [b"", b"[]", b"{}", b'{"turns": [1, {}], "reward": "x", "environment": 7, "example_index": 1e99}']
        ),
    ),
    max_size=8,
)


def whole(path: Path) -> StepIndex:
    index = StepIndex(path)
    index.advance(moment(60))
    assert index.is_complete
    return index


@pytest.mark.slow
@settings(max_examples=100)
@given(lines=LINES, cut=st.integers(0, 400))
def test_any_cut_of_any_file_has_a_row_for_each_whole_line(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], cut: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    data = b"".join(line + b"\n" for line in lines)[:cut]
    path.write_bytes(data)
    index = StepIndex(path)
    index.advance(0.0)  # one line at a time: the moment has passed
    while not index.is_complete:
        before = index.read_bytes
        index.advance(0.0)
        assert index.is_complete or index.read_bytes > before
    rows, ended = index.rows(), data.count(b"\n")
    assert [data[row.offset : row.offset + row.length] for row in rows] == data.splitlines(keepends=True)[:ended] or (
        b"\r" in data or b"\x0b" in data  # which `splitlines` takes for ends of lines, too
    )
    assert len(rows) == ended
    assert b"".join(data[row.offset : row.offset + row.length] for row in rows) == data[: data.rfind(b"\n") + 1]
    assert index.torn_bytes == len(data) - (data.rfind(b"\n") + 1)
    assert rows == whole(path).rows() == [index.row(number) for number in range(len(rows))]


def test_rows_have_what_lists_are_sorted_and_filtered_by(job: Path) -> None:
    index = whole(job / "run_one/rollouts/step_3/rollouts.jsonl")
    rows = index.rows()
    assert [row.outcome for row in rows] == [
        "completed", "completed", "filtered", "failed", "completed", "inference_failed",
    ]  # fmt: skip
    assert [row.reward for row in rows] == [0.5, 0.75, -1.0, None, 0.9, None]
    assert (rows[1].environment, rows[1].players, rows[1].turns, rows[1].advantage) == ("duel", ("white",), 2, 0.25)
    assert [row.example_index for row in index.rows_of("toy", 7)] == [7]
    assert index.rows_of("duel", 7) == index.rows_of("nothing", 7) == index.rows_of("toy", 2**70) == []
    sorts: tuple[Sort, ...] = get_args(Sort)
    order = {sort: [row.number for _, row in select([(3, index)], RowFilter(), sort).part] for sort in sorts}
    assert order["worst"] == [2, 0, 1, 4, 3, 5]
    assert order["best"] == [4, 1, 0, 2, 3, 5]
    assert order["longest"][0] == 3
    assert order["longest"][-1] == 5
    everything = select([(3, index), (2, index)], RowFilter(), "newest", 5, 2)
    assert [(step, row.number) for step, row in everything.part] == [(3, 5), (2, 0)]
    assert (everything.total, everything.of, everything.environments, everything.players) == (
        12, 12, {row.environment for row in rows}, {player for row in rows for player in row.players},
    )  # fmt: skip


def test_a_list_has_the_rows_whose_records_its_filter_takes(job: Path) -> None:
    path = job / "run_one/rollouts/step_3/rollouts.jsonl"
    index, records = whole(path), [record_in(line) for line in path.read_bytes().splitlines()]
    for wanted, numbers in (
        (RowFilter(least_reward=0.5, most_reward=0.8), [0, 1]),
        (RowFilter(player="white", environment="duel"), [1]),
        (RowFilter(player="duel"), []),
        (RowFilter(outcome="failed"), [3]),
        (RowFilter(environment="nothing"), []),
    ):
        found = select([(3, index)], wanted, "newest")
        assert [row.number for _, row in found.part] == numbers
        assert [at for at, record in enumerate(records) if record and wanted.takes_record(record)] == numbers
        assert (found.total, found.of) == (len(numbers), len(index))


@pytest.mark.parametrize("tokens", [2**63, -(2**63), -1e308, 1e308])
def test_numbers_that_no_index_holds_are_cut_off(tmp_path: Path, tokens: float) -> None:
    record = orjson.dumps(RECORD | {"turns": [{"completion_tokens": tokens}]})
    index = whole(write_lines(tmp_path, "one", 1, b"\n".join([record, record, b""])))
    assert [row.completion_tokens for row in index.rows()] == [2**53 if tokens > 0 else -(2**53)] * 2
    assert index.row(0) == index.rows()[0]


def test_a_line_that_is_too_long_is_listed_and_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_index, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(line_index, "_PIECE_BYTES", 300)
    long, short = orjson.dumps(RECORD | {"error": "x" * 5000}), orjson.dumps(RECORD)
    path = write_lines(tmp_path, "one", 1, b"\n".join([short, long, short, b""]))
    index = StepIndex(path)
    while not index.is_complete:
        index.advance(0.0)
    assert [row.outcome for row in index.rows()] == ["completed", "damaged", "completed"]
    assert [row.length for row in index.rows()] == [len(short) + 1, len(long) + 1, len(short) + 1]
    assert index.torn_bytes == 0


def test_a_file_of_too_many_lines_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_index, "MAX_ROWS", 3)
    write_lines(tmp_path, "one", 1, b"{}\n" * 5)
    indexes = StepIndexes(tmp_path)
    progress = indexes.index("one", [1], moment(60))
    assert progress.is_complete
    assert progress.problems == ["step 1: only the first 3 rollouts are listed"]


def test_a_step_that_is_made_anew_is_indexed_anew(tmp_path: Path, chat: Chat) -> None:
    path = write_step(tmp_path, "one", 1, [spoken(chat, 1, "first", reward=0.1)], chat)
    indexes = StepIndexes(tmp_path)
    indexes.index("one", [1], moment(60))
    for file in path.parent.iterdir():
        file.unlink()
    path.parent.rmdir()
    write_step(tmp_path, "one", 1, [spoken(chat, 1, "again", reward=0.2), spoken(chat, 2, "more", reward=0.3)], chat)
    indexes.index("one", [1], moment(60))
    assert [row.reward for _, row in indexes.rows("one", [1])] == [0.2, 0.3]


def test_memory_is_bounded_by_rows_and_the_newest_used_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_indexes, "MOST_ROWS", 10)
    for step in range(1, 6):
        write_lines(tmp_path, "one", step, orjson.dumps(RECORD) + b"\n" + b"{}\n" * 3)
    indexes = StepIndexes(tmp_path)
    for _ in range(3):
        for step in range(1, 6):
            indexes.index("one", [step], moment(60))
            assert len(list(indexes.rows("one", [step]))) == 4
    assert len(list(indexes.rows("one", range(1, 6)))) == 8
    for step in (4, 5):
        os.truncate(tmp_path / f"run_one/rollouts/step_{step}/rollouts.jsonl", 0)
    indexes.index("one", [4, 5], moment(60))
    assert indexes._rows == 0


def test_steps_for_which_there_is_no_room_are_left_out_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_indexes, "MOST_ROWS", 10)
    for step in range(1, 6):
        write_lines(tmp_path, "one", step, orjson.dumps(RECORD) + b"\n" + b"{}\n" * 3)
    indexes = StepIndexes(tmp_path)
    newest_first = [5, 4, 3, 2, 1]
    for _ in range(2):
        progress = indexes.index("one", newest_first, moment(60))
        assert progress.is_complete
        assert progress.problems[0].startswith(
            "steps 1 to 2 are left out: the others have 12 rollouts, and at most 10 are "
        )
        assert {step for step, _ in indexes.rows("one", newest_first)} == {3, 4, 5}
    indexes.index("one", [1], moment(60))
    assert len(list(indexes.rows("one", [1]))) == 4


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "linked step"])
def test_what_is_no_file_is_not_read(tmp_path: Path, kind: str) -> None:
    path = write_lines(tmp_path, "one", 1, b"{}\n")
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "rollouts.jsonl").write_bytes(b'{"rollout_id": "secret"}\n')
    if kind == "linked step":
        path.parent.rename(path.parent.with_name("aside"))
        path.parent.symlink_to(secret, target_is_directory=True)
    else:
        path.unlink()
        if kind == "link":
            path.symlink_to(secret / "rollouts.jsonl")
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.mkdir()
    indexes = StepIndexes(tmp_path)
    progress = indexes.index("one", [1], moment(60))
    assert progress.is_complete
    assert len(progress.problems) == 1
    assert str(tmp_path) not in progress.problems[0]
    assert list(indexes.rows("one", [1])) == []
    with pytest.raises((UntrustedFileError, OSError)):
        StepIndex(path).advance(time.monotonic()) if kind != "linked step" else indexes._advance(StepIndex(path), 0.0)


def test_a_row_is_made_without_a_copy_of_all_names(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    lines = [orjson.dumps(RECORD | {"environment": f"toy-{number}"}) for number in range(2000)]
    path.write_bytes(b"\n".join([*lines, b""]))
    index = whole(path)
    tracemalloc.start()
    row = index.row(1999)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert row is not None
    assert row.environment == "toy-1999"
    assert peak < 8000, "2,000 names take 16,000 bytes"


@given(values=st.lists(st.floats(allow_infinity=True, allow_nan=True), max_size=50))
def test_a_histogram_counts_each_finite_value_once(values: list[float]) -> None:
    found = histogram(np.array(values, np.float64))
    finite = [value for value in values if math.isfinite(value)]
    assert sum(found.counts) == len(finite)
    assert len(found.edges) == (len(found.counts) + 1 if finite else 0)
    if finite:
        assert found.edges[0] <= min(finite) <= max(finite) <= found.edges[-1]
