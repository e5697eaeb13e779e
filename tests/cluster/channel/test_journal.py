"""`cluster.channel.journal`: what a host finds that follows one that was killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from counterpoint.cluster.channel import journal as journal_module
from counterpoint.cluster.channel.journal import StateJournal
from counterpoint.transport.files import journal as files_journal
from counterpoint.transport.files.journal import DamagedJournal


def write(journal: StateJournal, *changes: list[Any], frames: list[bytes] | None = None) -> None:
    """What the host does with changes, the state included; a record that is put has the frames."""
    notes = [
        (change, (frames or [b"tree", bytes([change[1]]) * 500]) if change[0] == "put" else []) for change in changes
    ]
    for note in notes:
        journal.state.apply(*note)
    journal.append(notes)


def put(sequence: int) -> list[Any]:
    return ["put", sequence, "source-0", sequence]


def content(journal: StateJournal) -> list[Any]:
    return [(change, [bytes(frame) for frame in frames]) for change, frames in journal.state.notes()]


@pytest.mark.parametrize("sync", [False, True])
def test_a_journal_holds_what_was_written(tmp_path: Path, sync: bool) -> None:
    journal = StateJournal(tmp_path, sync)
    write(
        journal,
        *map(put, range(5)),
        ["done", [1]],
        ["skip", "source-1", 7],
        ["end", "source-0"],
        ["own", 2, "trainer-0"],
    )
    write(journal, ["aside", 3])
    expected = content(journal)
    with pytest.raises(OSError, match="another host"):
        StateJournal(tmp_path)
    journal.close()
    for _ in range(2):
        again = StateJournal(tmp_path, sync)
        assert content(again) == expected
        assert (again.state.next_sequence, again.state.ended, [*again.state.kept]) == (5, {"source-0"}, [0, 2, 4])
        assert (again.state.kept[2].owner, [*again.state.aside]) == ("trainer-0", [3])
        assert again.state.positions["source-1"].above == [7]
        again.close()


@pytest.mark.parametrize("cut", [1, 10, 400, 530])
def test_an_entry_that_was_cut_off_does_not_count(tmp_path: Path, cut: int) -> None:
    journal = StateJournal(tmp_path)
    write(journal, put(0))
    write(journal, put(1))
    journal.close()
    os.truncate(tmp_path / "records", (tmp_path / "records").stat().st_size - cut)
    again = StateJournal(tmp_path)
    assert [*again.state.kept] == [0]
    write(again, put(1), frames=[b"another"])
    again.close()
    last = StateJournal(tmp_path)
    assert [record.frames[0] for record in last.state.kept.values()] == [b"tree", b"another"]
    last.close()


def test_what_is_acknowledged_takes_no_room_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SMALLEST_BYTES", 2000)
    journal = StateJournal(tmp_path)
    for sequence in range(40):
        write(journal, put(sequence))
        if sequence != 3:  # one is held for long
            write(journal, ["done", [sequence]])
    assert (tmp_path / "records").stat().st_size < 6000
    expected = content(journal)
    journal.close()
    again = StateJournal(tmp_path)
    assert content(again) == expected
    again.close()


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = StateJournal(tmp_path)

    def write_half(descriptor: int, buffers: object) -> None:
        os.write(descriptor, b"half")
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(files_journal, "write_buffers", write_half)
        with pytest.raises(OSError, match="no space"):
            write(journal, put(0))
    journal.append([(put(0), [b"tree"])])
    journal.close()
    again = StateJournal(tmp_path)
    assert [*again.state.kept] == [0]
    again.close()


def test_damage_and_an_earlier_version_are_refused(tmp_path: Path) -> None:
    journal = StateJournal(tmp_path)
    write(journal, put(0), put(1))
    journal.close()
    whole = (tmp_path / "records").read_bytes()
    (tmp_path / "records").write_bytes(whole[:-700] + bytes([whole[-700] ^ 1]) + whole[-699:])
    with pytest.raises(DamagedJournal, match="damaged at byte"):
        StateJournal(tmp_path)
    (tmp_path / "000000000001.journal").write_bytes(b"")
    with pytest.raises(DamagedJournal, match="earlier version"):
        StateJournal(tmp_path)


def test_a_disk_without_room_to_compact_doubles_no_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = StateJournal(tmp_path)
    write(journal, put(0))
    journal._journal._smallest = 1  # type: ignore[union-attr]

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(files_journal.Journal, "compact", full)
    notes: list[Any] = [(["done", [0]], ()), (put(1), [b"tree" * 100])]
    for note in notes:
        journal.state.apply(*note)
    for _ in range(2):  # the host believes that nothing of them is there
        with pytest.raises(OSError, match="no space"):
            journal.append(notes)
    journal.close()
    again = StateJournal(tmp_path)
    assert [*again.state.kept] == [0]
    again.close()
