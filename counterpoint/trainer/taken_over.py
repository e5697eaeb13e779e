"""A checkpoint of one run becomes that of another, by links: what a branch, a copy and a new run begin with.

Nothing here needs torch, so the command line does it, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import STABLE, publish_directory, published_steps
from counterpoint.transport.files.links import link_file
from counterpoint.transport.files.untrusted import UntrustedFileError, object_in, open_regular, read_json

DESCRIPTION = "state.json"

MAX_BYTES = 2**20
"""The size of a checkpoint's `state.json`."""


def durable_directories(output_dir: Path, run_id: str) -> dict[int, Path]:
    """Returns the trainer's checkpoints of a run by step, also those saved until their asker removes them."""
    found: dict[int, Path] = {}
    # A saved one last: the thread that writes checkpoints may remove the other any time.
    for parent in (output_dir / "trainer" / run_id / name for name in ("checkpoints", "saved")):
        found |= {step: parent / f"step_{step}" for step in published_steps(parent)}
    return dict(sorted(found.items()))


def start_directory(output_dir: Path, run_id: str) -> Path:
    """Returns the directory of the adapter that a run has begun with."""
    return output_dir / "trainer" / run_id / "start"


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


def take_over(source: Path, target: Path, **changed: Any) -> None:
    """Publishes the checkpoint `source` as `target`, by links, with other values of keys in its `state.json`.

    Raises `FileNotFoundError` if it was removed meanwhile, `OSError`, and `UntrustedFileError` for a damaged `state.json`.
    """
    description = read_json(source / DESCRIPTION, MAX_BYTES) | changed
    with _linked(source, target, "*.safetensors") as directory:  # one file of each rank
        (directory / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")


def link_directory(source: Path, target: Path) -> None:
    """Publishes all files of a published directory as another one, by links. Raises as `take_over`."""
    with _linked(source, target, "*"):
        pass


@contextmanager
def _linked(source: Path, target: Path, pattern: str) -> Iterator[Path]:
    with publish_directory(target) as directory:
        for path in source.glob(pattern):
            if path.name != STABLE:
                link_file(path, directory / path.name)
        yield directory
        (source / STABLE).stat()  # a removal begins with it: all files above were there
