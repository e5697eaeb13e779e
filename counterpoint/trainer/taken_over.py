"""A run's durable steps, and how the checkpoint of one becomes another's, by links: of a branch, a copy, a new run, a save.

Nothing here needs torch, so the command line does it, too.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from counterpoint.run.trainer_files import checkpoints_directory, saved_directory
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import STABLE, publish_directory, published_steps
from counterpoint.transport.files.format_number import check_format
from counterpoint.transport.files.links import link_file
from counterpoint.transport.files.untrusted import UntrustedFileError, object_in, open_regular, read_json

FORMAT = 1
"""The format of a checkpoint."""

DESCRIPTION = "state.json"

MAX_BYTES = 2**24
"""The size of a checkpoint's `state.json`, which has a number for each weight that is divided over ranks."""


def durable_directories(output_dir: Path, run_id: str) -> dict[int, Path]:
    """Returns the trainer's checkpoints of a run by step, ascending, also those saved until their asker removes them."""
    found: dict[int, Path] = {}
    # A saved one last: the thread that writes checkpoints may remove the other any time.
    for parent in (checkpoints_directory(output_dir, run_id), saved_directory(output_dir, run_id)):
        found |= {step: parent / f"step_{step}" for step in published_steps(parent)}
    return dict(sorted(found.items()))


def copied_steps(output_dir: Path, run_id: str) -> dict[int, str]:
    """Returns the steps whose batches the trainer did not train, since it copied another run at them, each with that in words.

    Its metrics have them for good; the journal of a copy goes once it is durable. Raises `OSError`, and `UserError` for what is
    no regular file.
    """
    found: dict[int, str] = {}
    try:
        with suppress(FileNotFoundError), open_regular(output_dir / "trainer" / "metrics.jsonl") as file:
            for raw in iter(partial(file.readline, MAX_BYTES), b""):
                line = object_in(raw) if b'"copied/run"' in raw else None
                if line is not None and line.get("run_id") == run_id and isinstance(line.get("step"), int):
                    found[line["step"]] = f"it is a copy of step {line.get('copied/step')} of run {line['copied/run']}"
    except UntrustedFileError as error:
        raise UserError(str(error)) from None
    return found


def leading_to(step: int, checkpoints: Iterable[int], batches: Container[int]) -> list[int]:
    """Returns those of the checkpoints' steps after which there is the batch of each step up to `step`, if any."""
    first = step
    while first in batches:
        first -= 1
    return [each for each in checkpoints if first <= each <= step]


def description_of(directory: Path, run_id: str, step: int) -> dict[str, Any]:
    """Returns what the `state.json` of a checkpoint says: with a table `progress`, in which `schedule_offset` may be missing.

    Raises `ValueError` unless it is of that step of that run, and in our format, and `OSError`.
    """
    description = read_json(directory / DESCRIPTION, MAX_BYTES)
    check_format(description.get("format"), FORMAT)
    progress = description.get("progress")
    if not isinstance(progress, dict) or type(progress.get("schedule_offset", 0)) is not int:
        raise ValueError(f"progress in {directory / DESCRIPTION} is {progress!r}; expected a table of whole numbers")
    if (of := description.get("run_id")) != run_id:
        raise ValueError(f"it is of run {of!r}; expected {run_id!r}")
    if (of := progress.get("step")) != step:
        raise ValueError(f"it is of step {of}; expected {step}")
    return description


def take_over(source: Path, target: Path, run_id: str, step: int) -> None:
    """Publishes `source`, the checkpoint of a run's step, as `target`, below the directory of another run.

    Raises `FileNotFoundError` if it was removed meanwhile, `OSError`, and `ValueError` if it is not of that step.
    """
    description = description_of(source, run_id, step) | {"run_id": target.parents[1].name}
    with linked(source, target, "*.safetensors") as directory:  # one file of each rank
        (directory / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")


def keep(output_dir: Path, run_id: str, step: int) -> None:
    """Keeps the checkpoint of `step` beyond the newest ones, until its asker removes it. Raises `OSError`."""
    target = saved_directory(output_dir, run_id) / f"step_{step}"
    if step not in published_steps(target.parent):
        with linked(checkpoints_directory(output_dir, run_id) / target.name, target):
            pass


@contextmanager
def linked(source: Path, target: Path, pattern: str = "*") -> Iterator[Path]:
    """Publishes the files of a published directory as those of another, by links. The block may add files to what it yields.

    Raises `FileNotFoundError` if the source was removed meanwhile, and `OSError`.
    """
    with publish_directory(target) as directory:
        for path in source.glob(pattern):
            if path.name != STABLE:
                link_file(path, directory / path.name)
        yield directory
        (source / STABLE).stat()  # a removal begins with it: all files above were there
