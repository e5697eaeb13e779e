"""Every line of a bounded log is given once, however it grows and rotates; whatever stands in its place is left out."""

from __future__ import annotations

import os
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.readers.activity import rotated_lines
from serve.readers.activity.rotated_lines import RotatedLinesFollower
from transport.files.rotated_lines import RotatedLines


def numbers(follower: RotatedLinesFollower) -> list[int]:
    """The lines that are new, and each is where it is said to be."""
    found = []
    for block in follower.new_blocks():
        assert follower.read(block.file, block.offset, len(block.data)) == block.data
        found += [orjson.loads(line)["number"] for line in block.data.splitlines()]
    return found


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=25))
@settings(max_examples=40)
def test_each_line_is_given_once_across_rotations(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, bool]]
) -> None:
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    writer, follower, written, given_ = RotatedLines(path, "lines", 400), RotatedLinesFollower(path), 0, []
    for count, looks in steps:
        writer.append({"number": written + index} for index in range(count))
        written += count
        # A file of 400 bytes takes some 27 lines: the reader looks often enough that no file comes and goes between two looks.
        if looks or count > 4:
            given_ += numbers(follower)
    given_ += numbers(follower)
    assert sorted(given_) == sorted(set(given_))
    assert set(given_) <= set(range(written))
    files = [file for file in (path.with_name("log.jsonl.1"), path) if file.exists()]
    kept = [orjson.loads(line)["number"] for file in files for line in file.read_bytes().splitlines()]
    assert set(kept) <= set(given_)
    assert numbers(follower) == []


def test_a_torn_line_counts_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"number": 1}\n{"num')
    follower = RotatedLinesFollower(path)
    assert numbers(follower) == [1]
    with path.open("ab") as file:
        file.write(b'ber": 2}\n')
    assert numbers(follower) == [2]
    path.write_bytes(b'{"number": 7}\n')
    assert numbers(follower) == [7], "another file under the same name"


def test_a_line_without_end_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotated_lines, "BLOCK_BYTES", 64)
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"number": 1}\n{"number": "' + b"x" * 1000 + b'"}\n{"number": 2}\n')
    assert numbers(RotatedLinesFollower(path)) == [1, 2]


def test_of_a_huge_file_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotated_lines, "NEWEST_BYTES", 100)
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join(b'{"number": %d}\n' % number for number in range(1000)))
    assert numbers(RotatedLinesFollower(path)) == list(range(994, 1000))


@pytest.mark.parametrize("kind", ["missing", "fifo", "link", "directory", "empty"])
def test_what_is_no_file_is_left_out(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "log.jsonl"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "link":
            (tmp_path / "other").write_bytes(b'{"number": 1}\n')
            path.symlink_to(tmp_path / "other")
        case "directory":
            path.mkdir()
        case "empty":
            path.touch()
    assert numbers(RotatedLinesFollower(path)) == []
