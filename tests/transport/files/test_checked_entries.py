"""`transport.files.checked_entries`: what a killed writer leaves is told from damage, at every bit and every length."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.transport.files import checked_entries
from counterpoint.transport.files.checked_entries import DamagedEntry, EntryFile, head_of, read_entries, read_entry_file

BODIES = [b"one", b"", b"\0" * 20, b"four" * 5]
WHOLE = b"".join(part for body in BODIES for part in (head_of([body[:2], body[2:]]), body))


def bodies(content: bytes) -> list[bytes]:
    return [bytes(body) for body, _ in read_entries(content)]


def test_entries_are_read_as_written_with_their_ends() -> None:
    assert bodies(WHOLE) == BODIES
    assert [end for _, end in read_entries(WHOLE)][-1] == len(WHOLE)
    assert bodies(b"") == []


def test_any_flipped_bit_is_damage() -> None:
    for bit in range(8 * len(WHOLE)):
        damaged = bytearray(WHOLE)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedEntry):
            bodies(bytes(damaged))


@given(kept=st.integers(0, len(WHOLE)), zeros=st.integers(0, 100))
def test_an_end_that_was_cut_off_is_none(kept: int, zeros: int) -> None:
    ends = [end for _, end in read_entries(WHOLE)]
    assert bodies(WHOLE[:kept]) == BODIES[: sum(end <= kept for end in ends)]
    assert bodies(WHOLE + bytes(zeros)) == BODIES


@given(lists=st.lists(st.lists(st.binary(max_size=40), max_size=3), max_size=4), data=st.data())
def test_a_file_that_breaks_off_at_any_byte_goes_on_after_its_last_whole_entry(
    lists: list[list[bytes]], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        file = EntryFile(path)
        for some in lists:
            file.append([part for body in some for part in (head_of([body]), body)])
        file.close()
        whole = [body for some in lists for body in some]
        assert [bytes(body) for body, _ in read_entry_file(path)] == whole
        assert file.length == path.stat().st_size
        kept = data.draw(st.integers(0, file.length), label="bytes kept")
        os.truncate(path, kept)
        left = list(read_entry_file(path))
        ends, end = [end for _, end in left], left[-1][1] if left else 0
        assert [bytes(body) for body, _ in left] == whole[: len(left)]
        assert all(end <= kept for end in ends)
        assert len(left) == len(whole) or kept < end + len(head_of([b""])) + len(whole[len(left)])
        again = EntryFile(path, end)
        again.append([head_of([b"next"]), b"next"])
        again.close()
        assert [bytes(body) for body, _ in read_entry_file(path)] == [*whole[: len(left)], b"next"]


@given(bodies=st.lists(st.binary(max_size=40), min_size=1, max_size=4), data=st.data())
def test_a_file_with_any_byte_altered_is_refused_with_its_place(bodies: list[bytes], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        content = bytearray(b"".join(part for body in bodies for part in (head_of([body]), body)))
        begins = [0, *(end for _, end in read_entries(content))]
        place = data.draw(st.integers(0, len(content) - 1), label="byte")
        content[place] ^= data.draw(st.integers(1, 255), label="by")
        path.write_bytes(content)
        read: list[bytes] = []
        with pytest.raises(DamagedEntry) as refused:
            read.extend(bytes(body) for body, _ in read_entry_file(path))
        damaged = max(number for number, begin in enumerate(begins) if begin <= place)
        assert read == bodies[:damaged]
        assert refused.value.offset == begins[damaged]
        assert f"{path} is damaged at byte {begins[damaged]}" in str(refused.value)
        os.truncate(path, refused.value.offset)  # what the message says
        assert [bytes(body) for body, _ in read_entry_file(path)] == bodies[:damaged]


def test_an_append_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    file = EntryFile(path)
    file.append([head_of([b"one"]), b"one"])

    def write_half(descriptor: int, buffers: list[bytes]) -> None:
        os.write(descriptor, b"half")
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checked_entries, "write_buffers", write_half)
        with pytest.raises(OSError, match="no space"):
            file.append([head_of([b"two"]), b"two"])
    file.append([head_of([b"three"]), b"three"], sync=True)
    file.close()
    assert [bytes(body) for body, _ in read_entry_file(path)] == [b"one", b"three"]


def test_a_closed_file_says_that_it_cannot_be_flushed(tmp_path: Path) -> None:
    file = EntryFile(tmp_path / "journal")
    file.flush()
    file.close()
    file.close()
    with pytest.raises(OSError, match="closed"):
        file.flush()
