"""Notes and tags of a run, for people: `run_<id>/notes.json`, which whoever annotates the run replaces whole.

Without that file those of the run's configuration hold. Nobody but who shows runs reads them, and they may be changed at any
time, also once the run has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import Field, ValidationError

from counterpoint.transport.config import Config
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json

NOTES_FILE = "notes.json"

LONGEST_NOTES = 2000
MOST_TAGS = 16

MAX_BYTES = 2**15

Tag = Annotated[str, Field(max_length=40, pattern=r"^\w[\w.:/=+-]*$")]
"""A word of letters, digits and `_ . : / = + -`."""

NotesText = Annotated[str, Field(max_length=LONGEST_NOTES)]
Tags = Annotated[list[Tag], Field(max_length=MOST_TAGS)]


class Notes(Config, frozen=True):
    """What people wrote about a run."""

    notes: NotesText = ""
    """Text, as it stands."""
    tags: Tags = []
    """Words to find the run by."""

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Notes:
        """Takes them from a run's configuration, which anybody may have written; none of what is not valid."""
        try:
            return cls.model_validate({name: table[name] for name in cls.model_fields if name in table})
        except ValidationError:
            return cls()


NO_NOTES = Notes()


def read_notes(run_dir: Path) -> Notes | None:
    """Returns what was written about a run since it was configured; None if nothing was. A damaged file says so as a note."""
    try:
        return undamaged_notes(run_dir)
    except ValueError:
        return Notes(notes=f"{NOTES_FILE} cannot be read")


def undamaged_notes(run_dir: Path) -> Notes | None:
    """Returns the same for whoever keeps a part of it. Raises `ValueError` if the file cannot be read."""
    path = run_dir / NOTES_FILE
    try:
        return Notes.model_validate(read_json(path, MAX_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UntrustedFileError, ValidationError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def write_notes(run_dir: Path, notes: Notes) -> None:
    """Replaces what was written. Raises `OSError`."""
    write_atomically(run_dir / NOTES_FILE, orjson.dumps(notes.model_dump()))
