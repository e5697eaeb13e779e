"""Tasks of the chaos job that keep a copy of every batch that their orchestrator deletes, for the witness.

An orchestrator deletes `batch.bin` once its step is durable. Between the commit and that moment lies no time that a reader from
outside could count on: a busy machine may withhold it from the witness for as long. So these tasks, which the orchestrator loads
before it opens its connection to the trainer, listen to Python's own audit events: each deletion is announced by one, and waits
until the hook returns. Nothing else of the orchestrator changes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from counterpoint.environments.tasks.guess_number import GuessNumber
from counterpoint.environments.tasks.reverse_text import ReverseText
from perf.chaos.witness import Witness


class KeptReverseText(ReverseText):
    """`reverse-text` in an orchestrator that keeps its batches in the witness's notes."""

    def __init__(self, notes: str) -> None:
        super().__init__()
        keep_deleted_batches(Path(notes))


class KeptGuessNumber(GuessNumber):
    """The environment `guess-number`, likewise."""

    def __init__(self, notes: str) -> None:
        super().__init__()
        keep_deleted_batches(Path(notes))


def keep_deleted_batches(notes: Path) -> None:
    """Links each batch that this process deletes into the notes, from now on until it ends."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.remove":
            keep_copy(notes, *arguments)

    sys.addaudithook(hook)


def keep_copy(notes: Path, path: str | bytes | os.PathLike[str], directory: int) -> None:
    """Links the file that is to be deleted into the notes if it is a batch whose step is durable.

    A batch that was never committed is removed with its directory, and then named relative to a descriptor: `directory` is
    not -1. Raises `OSError`, which ends the deletion.
    """
    batch = Path(os.fsdecode(path))
    if directory != -1 or batch.name != "batch.bin":
        return
    run_id = batch.parents[2].name.removeprefix("run_")
    copy = Witness.copy_of(notes, run_id, int(batch.parent.name.removeprefix("step_")))
    copy.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError, FileNotFoundError):  # the witness was first; nothing is deleted
        os.link(batch, copy)
