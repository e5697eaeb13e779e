"""Files of other versions are told from damaged ones, and no message advises to remove them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import counterpoint.run.changes
from counterpoint.cluster import state_file
from counterpoint.cluster.manager.state import JobState
from counterpoint.transport.files.format_number import OtherFormatError, check_format


def test_its_own_number_is_read_and_another_one_says_which_version_wrote_it() -> None:
    check_format(3, 3)
    with pytest.raises(OtherFormatError, match=r"\bnewer\b.*\b4\b.*\b3\b"):
        check_format(4, 3)
    with pytest.raises(OtherFormatError, match=r"\bolder\b.*\b2\b.*\b3\b"):
        check_format(2, 3)
    check_format(2, 3, oldest=2)
    with pytest.raises(OtherFormatError, match=r"\bolder\b"):
        check_format(1, 3, oldest=2)


@pytest.mark.parametrize("found", [None, "3", 3.0, True, [3], {}])
def test_what_is_no_number_is_damage(found: object) -> None:
    with pytest.raises(ValueError, match="expected the number 3") as raised:
        check_format(found, 3)
    assert not isinstance(raised.value, OtherFormatError)


@pytest.mark.parametrize("kind", ["changes", "state"])
def test_a_file_of_a_newer_version_is_not_called_damaged(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(counterpoint.run.changes, "FORMAT", 2)
        newer.setattr(state_file, "FORMAT", 2)
        (tmp_path / "control").mkdir()
        counterpoint.run.changes.write_journal(tmp_path, [])
        state = state_file.to_bytes(state_file.MasterState(1, 1, 0.0, JobState()))
    read: dict[str, Callable[[], object]] = {
        "changes": lambda: counterpoint.run.changes.read_journal(tmp_path),
        "state": lambda: state_file.of_bytes(state, "there"),
    }
    with pytest.raises(
        (counterpoint.run.changes.JournalError, state_file.StateError), match="a newer version"
    ) as raised:
        read[kind]()
    assert "damaged" not in str(raised.value)
    assert "emove" not in str(raised.value)
