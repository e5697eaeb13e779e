"""Every line of a bounded log is given once, however it grows, is rotated or is read on by another process; a loss is known."""

from __future__ import annotations

import os
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.transport.files import appended_lines
from counterpoint.transport.files.place import Place
from counterpoint.transport.files.rotated_lines import FORMER, RotatedLines, RotatedReader
from counterpoint.transport.files.untrusted import UntrustedFileError


def numbers(reader: RotatedReader) -> list[int]:
    """The lines that are new, and each is where it is said to be."""
    found = []
    for place, block in reader.new_blocks():
        assert reader.read_before(place.plus(block), len(block)) == block
        found += [orjson.loads(line)["number"] for line in block.splitlines()]
    return found


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 6), st.booleans(), st.booleans()), max_size=25))
@settings(max_examples=40)
def test_each_line_is_given_once_across_rotations(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, bool, bool]]
) -> None:
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    writer, follower, written, given_ = RotatedLines(path, "lines", 400), RotatedReader(path), 0, []
    for count, looks, by_another in steps:
        writer.append({"number": written + index} for index in range(count))
        written += count
        # A file of 400 bytes takes some 27 lines: the reader looks often enough that no file comes and goes between two looks.
        if looks or count > 4:
            given_ += numbers(follower)
        if by_another:
            follower = RotatedReader(path, place=Place.restored(follower.place.saved()))
    given_ += numbers(follower)
    assert given_ == sorted(set(given_)), "each once, in order"
    assert set(given_) <= set(range(written))
    files = [file for file in (path.with_name("log.jsonl.1"), path) if file.exists()]
    kept = [orjson.loads(line)["number"] for file in files for line in file.read_bytes().splitlines()]
    assert set(kept) <= set(given_)
    assert numbers(follower) == []


def test_a_torn_line_counts_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"number": 1}\n{"num')
    follower = RotatedReader(path)
    assert numbers(follower) == [1]
    with path.open("ab") as file:
        file.write(b'ber": 2}\n')
    assert numbers(follower) == [2]
    path.write_bytes(b'{"number": 7}\n')
    assert numbers(follower) == [7], "another file under the same name"


def test_a_line_without_end_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appended_lines, "BLOCK_BYTES", 64)
    monkeypatch.setattr(appended_lines, "LONGEST_LINE", 128)
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"number": 1}\n{"number": "' + b"x" * 1000 + b'"}\n{"number": 2}\n')
    assert numbers(RotatedReader(path)) == [1, 2]


def test_of_a_huge_file_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"".join(b'{"number": %d}\n' % number for number in range(1000)))
    assert numbers(RotatedReader(path, newest_bytes=100)) == list(range(994, 1000))


def test_each_line_is_read_once_across_rotations_and_restarts(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    writer = RotatedLines(path, "lines", 100)
    reader = RotatedReader(path)
    assert reader.next_lines() == []
    seen: list[bytes] = []
    for number in range(30):
        writer.append([{"n": number}])
        if number % 3 == 0:
            seen += [line.text for line in reader.next_lines()]
            reader = RotatedReader(path, place=Place.restored(reader.place.saved()))
    seen += [line.text for line in reader.next_lines()]
    assert seen == [b'{"n":%d}' % number for number in range(30)]
    assert reader.lost == 0


def test_two_rotations_between_two_reads_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    writer = RotatedLines(path, "lines", 20)
    reader = RotatedReader(path)
    writer.append([{"n": 0}])
    assert [line.text for line in reader.next_lines()] == [b'{"n":0}']
    before = reader.place
    for number in range(1, 10):
        writer.append([{"n": number}])
    assert reader.next_lines()[-1].text == b'{"n":9}'
    assert reader.lost == 1
    assert reader.read_before(before, before.offset) == b"", "its file is gone"


def test_a_new_file_without_a_whole_line_does_not_lose_the_place_in_the_former_part(tmp_path: Path) -> None:
    path, former = tmp_path / "log.jsonl", tmp_path / "log.jsonl.1"
    former.write_bytes(b'{"number": 1}\n')
    path.write_bytes(b'{"num')
    reader = RotatedReader(path)
    assert numbers(reader) == [1]
    reader = RotatedReader(path, place=Place.restored(reader.place.saved()))
    assert numbers(reader) == []
    with path.open("ab") as file:
        file.write(b'ber": 2}\n')
    assert numbers(reader) == [2]
    assert reader.lost == 0


def test_a_look_that_ends_early_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appended_lines, "BLOCK_BYTES", 32)
    monkeypatch.setattr(appended_lines, "MOST_BYTES", 64)
    path, former = tmp_path / "log.jsonl", tmp_path / "log.jsonl.1"
    former.write_bytes(b"".join(b'{"number": %d}\n' % number for number in range(10)) + b"half a line")
    path.write_bytes(b"".join(b'{"number": %d}\n' % number for number in range(10, 20)))
    reader, looks = RotatedReader(path), []
    while look := numbers(reader):
        looks.append(look)
    assert [number for look in looks for number in look] == [*range(20)]
    assert looks[0] == [*range(6)], "no more than `MOST_BYTES` at once"


@pytest.mark.parametrize("kind", ["missing", "fifo", "link", "directory", "empty"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
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
    if kind in ("missing", "empty"):
        assert numbers(RotatedReader(path)) == []
    else:
        with pytest.raises((OSError, UntrustedFileError)):
            numbers(RotatedReader(path))


def test_a_former_part_that_cannot_be_read_hides_nothing_of_the_present_one(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"number": 1}\n')
    path.with_name(f"{path.name}{FORMER}").mkdir()
    assert numbers(RotatedReader(path)) == [1]
