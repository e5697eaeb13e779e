"""`cluster.channel.journal`: what a host finds that follows one that was killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from counterpoint.cluster.channel import journal as journal_module
from counterpoint.cluster.channel.journal import StateJournal
from counterpoint.transport.files.journal import DamagedJournal


def write(journal: StateJournal, *changes: list[Any]) -> None:
    """What the host does with changes, the state included."""
    notes = [(change, [b"tree", bytes([change[1]]) * 500] if change[0] == "put" else []) for change in changes]
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
