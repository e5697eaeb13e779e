"""JSON Lines: half a line costs no other line, whatever left it there."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.transport.files.json_lines import append_line, read_lines


def steps_in(path: Path) -> list[int]:
    return [line["step"] for _, line in read_lines(path)]


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Files end there, as on a disk that is full: a write is cut short, and the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        append_line(path, {"step": step}, durable=step == 2)
    assert path.read_bytes() == b'{"step":1}\n{"step":2}\n'


def test_a_write_that_is_cut_short_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"step": 1})
    with largest_file(20), pytest.raises(OSError, match="File too large"):
        append_line(path, {"step": 2, "text": "x" * 100})
    assert path.read_bytes() == b'{"step":1}\n'
    append_line(path, {"step": 3})
    assert steps_in(path) == [1, 3]


@pytest.mark.parametrize("torn", [b'{"step": 2, "rew', b"x" * 200_000])
@pytest.mark.parametrize("before", [b"", b'{"step":1}\n'])
def test_half_a_line_of_a_writer_that_was_killed_is_removed(tmp_path: Path, before: bytes, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(before + torn)
    append_line(path, {"step": 3})
    assert path.read_bytes() == before + b'{"step":3}\n'


@given(
    st.lists(
        st.sampled_from([b'{"step":1}\n', b'{"step":1}', b"[1]\n", b"\n", b"{\n", b"\xff\n", b'{"a":']), max_size=8
    )
)
def test_only_whole_objects_are_read(tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(b"".join(pieces))
    found = list(read_lines(path))
    assert all(raw == b'{"step":1}\n' and line == orjson.loads(raw) for raw, line in found)
    assert len(found) == path.read_bytes().splitlines(keepends=True).count(b'{"step":1}\n')


def test_nothing_is_read_where_there_is_no_file(tmp_path: Path) -> None:
    assert steps_in(tmp_path / "metrics.jsonl") == []


def test_a_line_that_cannot_be_flushed_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines.jsonl"
    append_line(path, {"step": 1}, durable=True)

    def broken(descriptor: int) -> None:
        raise OSError(5, "the disk is broken")

    with monkeypatch.context() as patched:
        patched.setattr("counterpoint.transport.files.json_lines.sync", broken)
        with pytest.raises(OSError, match="broken"):
            append_line(path, {"step": 2}, durable=True)
    assert steps_in(path) == [1]
