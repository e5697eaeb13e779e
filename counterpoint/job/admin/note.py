"""Writes notes and tags of a run, live or ended: they are files of the run, and no process is asked."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from counterpoint.job.admin.ask import Outcome, Refused, await_lock, run_directory
from counterpoint.job.directory import written_config
from counterpoint.run.notes import NOTES_FILE, Notes, NotesText, Tags, undamaged_notes, write_notes
from counterpoint.transport.config import Config


class NoteChange(Config):
    """What notes and tags are to be."""

    notes: NotesText | None = None
    """Text in place of the present one, at most 2,000 characters; unset, it stays."""
    tags: Tags | None = None
    """Words in place of the present ones, at most 16; unset, they stay."""


class Noted(Outcome, frozen=True):
    """What is written about a run."""

    notes: str
    """The text of the notes."""
    tags: list[str]
    """Words to find it by."""


def note_run(job: Path, run_id: str, asked: NoteChange) -> Noted:
    """Replaces notes, tags, or both. Equal tags are one. Raises `NotThere`, and `Refused` for a damaged file."""
    return replace_notes(job, run_id, lambda before: asked)


def replace_notes(job: Path, run_id: str, change: Callable[[Notes], NoteChange]) -> Noted:
    """Replaces notes and tags by what `change` makes of the present ones. One process at a time. Raises as `note_run`."""
    run_dir = run_directory(job, run_id)
    before = _present(job, run_id, run_dir)
    wanted = _changed(before, change(before))
    if wanted != before:  # whoever may only read takes no lock
        lock = await_lock(run_dir / f"{NOTES_FILE}.lock")
        try:
            before = _present(job, run_id, run_dir)
            wanted = _changed(before, change(before))
            write_notes(run_dir, wanted)
        finally:
            os.close(lock)
    sentence = " ".join([f"run {run_id}:", *(f"[{tag}]" for tag in wanted.tags), wanted.notes]).rstrip()
    return Noted(run_id=run_id, sentence=sentence, notes=wanted.notes, tags=wanted.tags)


def _present(job: Path, run_id: str, run_dir: Path) -> Notes:
    try:
        return undamaged_notes(run_dir) or Notes.of(written_config(job, run_id))
    except ValueError as error:
        raise Refused(
            f"{error}. Correct the file, or remove it: then notes and tags are those of the run's file"
        ) from None


def _changed(before: Notes, asked: NoteChange) -> Notes:
    return Notes(
        notes=before.notes if asked.notes is None else asked.notes,
        tags=before.tags if asked.tags is None else list(dict.fromkeys(asked.tags)),
    )
