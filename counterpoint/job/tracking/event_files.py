"""TensorBoard's files (extra `tensorboard`): a writer that begins after what a directory has, and a reader.

`counterpoint/tune/callbacks/tensorboard_logger.py` uses the same writer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from counterpoint.transport.process.imports import without_modules

_PATTERN = "events.out.tfevents.*"
_LARGEST_EVENT = 64 * 2**20


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
    before = len(_files(directory))
    purge = {"purge_step": first_step} if before and first_step is not None else {}
    # The number keeps two files of one second apart, and in order.
    return writer(str(directory), flush_secs=30, filename_suffix=f".{before:06d}", **purge)


def read_scalars(directory: Path) -> dict[int, dict[str, float]]:
    """Returns what TensorBoard shows of a directory: by step, each scalar's value.

    A file that says from which step on it replaces the older ones does. Raises `OSError`.
    """
    shown: dict[int, dict[str, float]] = {}
    for file in _files(directory):
        for event in _events(file):
            if event.HasField("session_log"):
                shown = {step: values for step, values in shown.items() if step < event.step}
            for value in event.summary.value:
                shown.setdefault(event.step, {})[value.tag] = value.simple_value
    return shown


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob(_PATTERN), key=lambda file: file.name.rpartition(".")[2])


def _events(file: Path) -> Iterator[Any]:
    """The whole events of a file: TFRecord's length, checksum, data, checksum. A killed writer leaves a part of one."""
    library()
    from tensorboardX.proto.event_pb2 import Event

    with file.open("rb") as content:
        while len(header := content.read(12)) == 12:
            (size,) = struct.unpack("<Q", header[:8])
            data = content.read(min(size, _LARGEST_EVENT))
            if len(content.read(4)) < 4:
                return
            event = Event()
            event.ParseFromString(data)
            yield event
