"""TensorBoard's files (extra `tensorboard`): how the next one of a directory is named, and a writer of it.

The sink of a job and `counterpoint/tune/callbacks/tensorboard_logger.py` use it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from counterpoint.transport.process.imports import without_modules


def library() -> Any:
    """Returns tensorboardX, imported without torch. Raises `ImportError` without the extra.

    By itself it imports torch where that is installed, for tensors that nobody gives it: 2 s of CPU and 180 MB.
    """
    with without_modules("torch", to=("tensorboardX",)):
        import tensorboardX
    return tensorboardX


def open_writer(directory: Path, first_step: int | None) -> Any:
    """Returns tensorboardX's `SummaryWriter` for a new file in the directory.

    If there are older files, the new one says that it replaces them from `first_step` on. Raises `ImportError` without the extra.
    """
    writer = library().SummaryWriter
    directory.mkdir(parents=True, exist_ok=True)
    before = files_in(directory)
    purge = {"purge_step": first_step} if before and first_step is not None else {}
    return writer(str(directory), flush_secs=30, filename_suffix=suffix(before), **purge)


def files_in(directory: Path) -> int:
    """Returns how many files there are."""
    return len(list(directory.glob("events.out.tfevents.*")))


def suffix(before: int) -> str:
    """Returns the end of the next file's name: its number keeps two files of one second apart, and in order."""
    return f".{before:06d}"
