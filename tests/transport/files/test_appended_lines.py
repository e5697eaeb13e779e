"""Each line of a growing file is given once, whatever happens between two looks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from counterpoint.transport.files import appended_lines, place
from counterpoint.transport.files.appended_lines import AppendedLines
from counterpoint.transport.files.untrusted import UntrustedFileError


class Reader:
    """What a reader has of a file."""

    def __init__(self, path: Path, newest_bytes: int | None = None) -> None:
        self.lines: list[tuple[int, bytes]] = []
        self.restarts = 0
        self._source = AppendedLines(path, newest_bytes)

    def look(self) -> list[bytes]:
        """Reads on; returns all lines so far."""
        for offset, block in self._source.new_blocks(self._restart):
            assert block.endswith(b"\n")
            for raw in block.split(b"\n")[:-1]:
                self.lines.append((offset, raw))
                offset += len(raw) + 1
        return [raw for _, raw in self.lines]

    def _restart(self) -> None:
        self.restarts += 1
        self.lines.clear()


def whole_lines(content: bytes, longest: int) -> list[bytes]:
    """What a reader of the whole file sees."""
    return [line for line in content.split(b"\n")[:-1] if len(line) <= longest]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a file of some hundred bytes has many blocks and a line that is too long."""
    monkeypatch.setattr(appended_lines, "BLOCK_BYTES", 16)
    monkeypatch.setattr(appended_lines, "LONGEST_LINE", 40)
    monkeypatch.setattr(place, "COMPARED_BYTES", 12)


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
def test_reading_at_any_cuts_equals_reading_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = st.binary(max_size=60).map(lambda data: data.replace(b"\n", b"."))

    @settings(max_examples=100, deadline=None)
    @given(lines=st.lists(line, max_size=12), tail=line, data=st.data())
    def holds(lines: list[bytes], tail: bytes, data: st.DataObject) -> None:
        content = b"".join(each + b"\n" for each in lines) + tail
        cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=6)))
        path.unlink(missing_ok=True)
        reader = Reader(path)
        for begin, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
            with path.open("ab") as file:
                file.write(content[begin:end])
            reader.look()
        assert reader.look() == whole_lines(content, 40)
        assert all(content[offset : offset + len(raw)] == raw for offset, raw in reader.lines)
        assert reader.restarts <= 1

    holds()


@pytest.mark.usefixtures("small_blocks")
def test_a_look_that_its_reader_ends_is_continued_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"12345678901\n" * 3)
    source = AppendedLines(path)
    blocks = []
    for _ in range(3):
        blocks.append(next(source.new_blocks(lambda: None)))
        assert source.more
    assert blocks == [(start, b"12345678901\n") for start in (0, 12, 24)]
    assert list(source.new_blocks(lambda: None)) == []
    assert not source.more


class RewrittenFile(RuleBasedStateMachine):
    """A file whose writers append, tear, truncate in place and replace. Every line is unique, as its times make it."""

    path: Path

    def __init__(self) -> None:
        super().__init__()
        self.path.unlink(missing_ok=True)
        self.reader = Reader(self.path)
        self.number = 0

    def line(self) -> bytes:
        self.number += 1
        return b"x" * (self.number % 23) + b"%08d" % self.number  # the end tells lines apart, as its times do

    @rule(count=st.integers(1, 5))
    def append(self, count: int) -> None:
        with self.path.open("ab") as file:
            file.writelines(self.line() + b"\n" for _ in range(count))

    @rule()
    def tear(self) -> None:
        with self.path.open("ab") as file:
            file.write(self.line()[:5])

    @rule(share=st.floats(0, 1), count=st.integers(0, 6))
    def rewrite_in_place(self, share: float, count: int) -> None:
        if not self.path.exists():
            return
        lines = self.path.read_bytes().split(b"\n")
        kept = b"".join(line + b"\n" for line in lines[: int(share * (len(lines) - 1))])
        os.truncate(self.path, len(kept))
        self.append(count)

    @rule(share=st.floats(0, 1), count=st.integers(0, 6))
    def replace(self, share: float, count: int) -> None:
        if not self.path.exists():
            return
        lines = self.path.read_bytes().split(b"\n")
        beside = self.path.with_suffix(".new")
        beside.write_bytes(b"".join(line + b"\n" for line in lines[: int(share * (len(lines) - 1))]))
        beside.replace(self.path)
        self.append(count)

    @rule()
    def look(self) -> None:
        self.reader.look()

    @invariant()
    def a_look_sees_the_file(self) -> None:
        content = self.path.read_bytes() if self.path.exists() else b""
        if self.number % 3 == 0:  # not after every rule, so that several happen between two looks
            assert self.reader.look() == whole_lines(content, 40)

    def teardown(self) -> None:
        content = self.path.read_bytes() if self.path.exists() else b""
        assert self.reader.look() == whole_lines(content, 40)


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
def test_a_file_that_is_cut_or_replaced_is_read_anew(tmp_path: Path) -> None:
    machine = type("Machine", (RewrittenFile,), {"path": tmp_path / "metrics.jsonl"})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=12, deadline=None))


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(b"%04d\n" % number for number in range(1000)))
    reader = Reader(path, newest_bytes=52)
    assert reader.look() == [b"%04d" % number for number in range(990, 1000)]
    with path.open("ab") as file:
        file.write(b"1000\n")
    assert reader.look()[-2:] == [b"0999", b"1000"]


@pytest.mark.parametrize("what", ["fifo", "directory", "link"])
def test_anything_but_a_regular_file_is_refused_without_waiting(tmp_path: Path, what: str) -> None:
    path = tmp_path / "metrics.jsonl"
    {"fifo": os.mkfifo, "directory": os.mkdir, "link": lambda at: os.symlink("/dev/zero", at)}[what](path)
    with pytest.raises(UntrustedFileError):
        Reader(path).look()


def test_one_look_reads_a_bounded_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_blocks: None
) -> None:
    """A guest can make its file of any size, even without a single line."""
    monkeypatch.setattr(appended_lines, "MOST_BYTES", 100)
    path = tmp_path / "lines"
    path.write_bytes(b"x" * 250 + b"\n" + b"a line\n")
    reader = Reader(path)
    assert [reader.look() for _ in range(3)] == [[], [], [b"a line"]]
    assert reader.restarts == 1


def test_lines_are_given_in_bounded_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appended_lines, "BLOCK_BYTES", 64)
    monkeypatch.setattr(appended_lines, "MOST_LINES", 100)
    (tmp_path / "lines").write_bytes(b"\n" * 1000)
    source = AppendedLines(tmp_path / "lines")
    given = 0
    while lines := source.next_lines(lambda: None):
        assert len(lines) <= 128
        assert lines[0].place.offset == given
        given += len(lines)
    assert given == 1000
