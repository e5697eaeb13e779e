"""`cluster.channel.journal`: what a host finds that follows one that was killed."""

from __future__ import annotations

import errno
import os
import struct
import zlib
from pathlib import Path

import pytest

from counterpoint.cluster.channel import journal as journal_module
from counterpoint.cluster.channel.journal import Journal, JournalError
from counterpoint.cluster.channel.positions import PositionSet
from counterpoint.transport.files import checked_entries
from counterpoint.transport.files.atomic import as_bytes_view


def put(journal: Journal, sequence: int, frames: list[bytes]) -> None:
    """What the host does with a record, the state included."""
    journal.state.next_sequence = sequence + 1
    journal.state.kept[sequence] = None
    journal.state.positions.setdefault("source-0", PositionSet()).add(sequence)
    journal.records[sequence] = ("source-0", sequence, frames)
    journal.put(sequence, "source-0", sequence, frames)


def forget(journal: Journal, sequence: int) -> None:
    del journal.state.kept[sequence]
    del journal.records[sequence]
    journal.acknowledge([sequence])


def content(journal: Journal) -> tuple[object, ...]:
    state = journal.state
    positions = {origin: (each.watermark, each.above) for origin, each in state.positions.items()}
    records = {
        sequence: (origin, position, [bytes(as_bytes_view(frame)) for frame in frames])
        for sequence, (origin, position, frames) in journal.records.items()
    }
    return journal.generation, state.next_sequence, positions, state.ended, [*state.kept], state.owners, records


@pytest.mark.parametrize("sync", [False, True])
def test_a_journal_holds_what_was_flushed(tmp_path: Path, sync: bool) -> None:
    journal = Journal(tmp_path, sync)
    for sequence in range(4):
        put(journal, sequence, [b"tree", bytes([sequence]) * 1000])
    forget(journal, 1)
    journal.skip("source-1", 7)
    journal.state.positions["source-1"] = PositionSet(0, [7])
    journal.end("source-0")
    journal.state.ended.add("source-0")
    journal.own("trainer-0", 2)
    journal.state.owners[2] = "trainer-0"
    journal.flush()
    expected = content(journal)
    journal.end("never flushed")
    journal.close()
    for _ in range(2):
        again = Journal(tmp_path, sync)
        assert content(again) == expected
        again.close()


@pytest.mark.parametrize("cut", [1, 10, 1000, 1030])
def test_an_entry_that_was_cut_off_does_not_count(tmp_path: Path, cut: int) -> None:
    journal = Journal(tmp_path)
    put(journal, 0, [b"a" * 1000])
    journal.flush()
    put(journal, 1, [b"b" * 1000])
    journal.flush()
    journal.close()
    segment = max(tmp_path.glob("*.journal"))
    os.truncate(segment, segment.stat().st_size - cut)
    again = Journal(tmp_path)
    assert list(again.records) == [0]
    put(again, 1, [b"c" * 1000])
    again.flush()
    again.close()
    last = Journal(tmp_path)
    assert [bytes(as_bytes_view(frames[0]))[:1] for *_, frames in last.records.values()] == [b"a", b"c"]
    last.close()


def test_segments_are_removed_once_their_records_are_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 2000)
    journal = Journal(tmp_path)
    for sequence in range(40):
        put(journal, sequence, [b"x" * 500])
        journal.flush()
        if sequence != 3:  # one that is held for long keeps its own segment only
            forget(journal, sequence)
            journal.flush()
    assert len([*tmp_path.glob("*.journal")]) <= 3
    expected = content(journal)
    journal.close()
    again = Journal(tmp_path)
    assert content(again) == expected
    again.close()


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path)
    put(journal, 0, [b"x" * 500])

    def write_half(descriptor: int, buffers: list[bytes]) -> None:
        os.write(descriptor, b"half")
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checked_entries, "write_buffers", write_half)
        with pytest.raises(OSError, match="no space"):
            journal.flush()
    journal.flush()
    expected = content(journal)
    journal.close()
    again = Journal(tmp_path)
    assert content(again) == expected
    again.close()


def test_one_host_has_a_journal_at_a_time(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(OSError, match="another host"):
        Journal(tmp_path)
    journal.close()


def test_a_missing_segment_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 100)
    journal = Journal(tmp_path)
    for sequence in range(2):
        put(journal, sequence, [b"x" * 200])
        journal.flush()
    journal.close()
    min(tmp_path.glob("*.journal")).unlink()
    with pytest.raises(JournalError, match="number 0"):
        Journal(tmp_path)


@pytest.mark.slow
def test_no_flipped_bit_alters_or_drops_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES", 300)
    journal = Journal(tmp_path)
    for sequence in range(4):
        put(journal, sequence, [b"tree", bytes([sequence]) * 100])
        journal.flush()
    forget(journal, 1)
    journal.flush()
    expected = content(journal)
    journal.close()
    segments = sorted(tmp_path.glob("*.journal"))
    assert len(segments) > 1
    for segment in segments:
        whole = segment.read_bytes()
        for bit in range(0, 8 * len(whole), 13):  # any bit of a byte, in few enough cases
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            segment.write_bytes(damaged)
            with pytest.raises(JournalError, match=f"{segment.name} is damaged at byte"):
                Journal(tmp_path)
        segment.write_bytes(whole)
    again = Journal(tmp_path)
    assert content(again) == expected
    again.close()


def test_what_an_earlier_version_wrote_is_told_from_damage(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    (segment,) = tmp_path.glob("*.journal")
    segment.write_bytes(struct.pack("<QII", 0, 1, zlib.crc32(b"\xc0")) + b"\xc0" * 9)
    with pytest.raises(JournalError, match="earlier version"):
        Journal(tmp_path)
