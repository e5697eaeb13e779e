"""Notes and tags of a run as they are now: what was written since, or else what its configuration has."""

from __future__ import annotations

from pathlib import Path

from counterpoint.job.directory import written_config
from counterpoint.run.notes import Notes, read_notes


def notes_of(directory: Path, run_id: str) -> Notes:
    """Returns notes and tags of a run of the job in `directory`; empty ones if it has none."""
    return read_notes(directory / f"run_{run_id}") or Notes.of(written_config(directory, run_id))
