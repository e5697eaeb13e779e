"""`transport.files.journal`: what a killed writer leaves is told from damage, at every bit and every length."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.transport.files import atomic
from counterpoint.transport.files import journal as journal_module
from counterpoint.transport.files.journal import HEAD_BYTES, DamagedJournal, FileJournal

FIRST = HEAD_BYTES + 8
"""Bytes of the first entry."""

BODIES = [b"one", b"", b"\0" * 20, b"four" * 5]


def made(path: Path, compacted: list[bytes], appended: list[bytes]) -> FileJournal:
    journal = FileJournal(path, 0)
    journal.replay()
    journal.compact([[body[:2], body[2:]] for body in compacted])
    journal.append([body[:2], body[2:]] for body in appended)
    return journal


def replayed(path: Path) -> list[bytes]:
    journal = FileJournal(path, 0)
    try:
        return [bytes(body) for body in journal.replay()]
    finally:
        journal.close()


def test_a_file_of_the_first_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(
        bytes.fromhex(
            "0800000000000000eea85107f473d6a12d000000000000000500000000000000fbd293a30ceaaf2973746174650300000000000000f1866c7ae6beb1ae6f6e65"
        )
    )
    assert replayed(path) == [b"state", b"one"]


def test_entries_are_replayed_in_order(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    made(path, BODIES[:2], BODIES[2:]).close()
    assert replayed(path) == BODIES
    assert replayed(tmp_path / "new") == []


def test_any_flipped_bit_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    made(path, BODIES[:1], BODIES[1:]).close()
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(DamagedJournal, match=f"{path} is damaged at byte"):
            replayed(path)
        assert path.read_bytes() == damaged


@given(
    compacted=st.lists(st.binary(max_size=40), max_size=3),
    appended=st.lists(st.binary(max_size=40), max_size=3),
    data=st.data(),
)
def test_a_file_that_breaks_off_goes_on_after_its_last_whole_entry_and_never_before_what_was_written_at_once(
    compacted: list[bytes], appended: list[bytes], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        made(path, compacted, appended).close()
        size, zeros = path.stat().st_size, data.draw(st.integers(0, 100), label="zeros")
        kept = data.draw(st.integers(0, size), label="bytes kept")
        os.truncate(path, kept)
        ends = [FIRST]
        for body in compacted + appended:
            ends.append(ends[-1] + HEAD_BYTES + len(body))
        if kept < ends[len(compacted)]:
            with pytest.raises(DamagedJournal):
                replayed(path)
            return
        if kept in ends:
            os.truncate(path, kept + zeros)  # as a machine leaves them that crashes
        whole = (compacted + appended)[: sum(end <= kept for end in ends) - 1]
        assert replayed(path) == whole
        again = FileJournal(path, 0)
        again.replay()
        again.append([[b"next"]])
        again.close()
        assert again.length == path.stat().st_size
        assert replayed(path) == [*whole, b"next"]


@given(bodies=st.lists(st.binary(max_size=40), min_size=1, max_size=4), data=st.data())
def test_a_file_with_a_byte_altered_is_refused_and_goes_on_where_the_message_says(
    bodies: list[bytes], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        made(path, [], bodies).close()
        content = bytearray(path.read_bytes())
        begins = [FIRST]
        for body in bodies:
            begins.append(begins[-1] + HEAD_BYTES + len(body))
        place = data.draw(st.integers(FIRST, len(content) - 1), label="byte")
        content[place] ^= data.draw(st.integers(1, 255), label="by")
        path.write_bytes(content)
        damaged = max(number for number, begin in enumerate(begins) if begin <= place)
        with pytest.raises(DamagedJournal, match=rf"truncate -s {begins[damaged]}\)"):
            replayed(path)
        os.truncate(path, begins[damaged])
        assert replayed(path) == bodies[:damaged]


@pytest.mark.parametrize("content", [b"", b"{}\n", b"\0" * 100, bytes(range(256))])
def test_what_is_no_journal_is_refused_and_left(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    with pytest.raises(DamagedJournal, match="no journal of this version"):
        replayed(path)
    assert path.read_bytes() == content


def test_a_journal_that_has_doubled_is_worth_compacting(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path / "journal", 100)
    journal.replay()
    journal.append([[b"a" * (100 - HEAD_BYTES)]])
    assert not journal.has_grown
    journal.append([[b"a"]])
    assert journal.has_grown
    journal.compact([[b"state" * 100]])
    size = journal.length
    for opened in (journal, FileJournal(journal.path, 100)):
        opened.replay()
        assert not opened.has_grown
    journal.append([[b"a" * size]])
    assert journal.has_grown
    assert [bytes(body) for body in journal.replay()] == [b"state" * 100, b"a" * size]


@pytest.mark.parametrize("call", ["append", "compact"])
def test_a_write_that_fails_leaves_the_journal_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    journal = made(tmp_path / "journal", [b"state"], [b"one"])

    def write_half(descriptor: int, buffers: list[bytes]) -> None:
        os.write(descriptor, b"half")
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        for module in (atomic, journal_module):
            patched.setattr(module, "write_buffers", write_half)
        with pytest.raises(OSError, match="no space"):
            getattr(journal, call)([[b"two"]])
    journal.append([[b"three"]], durable=True)
    journal.close()
    assert replayed(journal.path) == [b"state", b"one", b"three"]
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]


def test_a_journal_that_keeps_half_an_entry_takes_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = made(tmp_path / "journal", [b"state"], [])

    def broken(descriptor: int, *_: object) -> None:
        os.write(descriptor, b"half") if descriptor >= 0 else None
        raise OSError(errno.EIO, "the disk is broken")

    with monkeypatch.context() as patched:
        patched.setattr(journal_module, "write_buffers", broken)
        patched.setattr(os, "ftruncate", broken)
        with pytest.raises(OSError, match="broken"):
            journal.append([[b"one"]])
    with pytest.raises(OSError, match="descriptor"):
        journal.append([[b"two"]])
    assert replayed(journal.path) == [b"state"]


def test_a_closed_journal_takes_nothing(tmp_path: Path) -> None:
    journal = made(tmp_path / "journal", [], [])
    journal.flush()
    journal.close()
    journal.close()
    for call in (journal.flush, lambda: journal.append([[b"one"]])):
        with pytest.raises((OSError, ValueError), match="descriptor"):
            call()
    assert replayed(journal.path) == []
