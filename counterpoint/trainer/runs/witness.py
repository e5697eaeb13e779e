"""What the trainer notes of each published step, `trainer/<run_id>/trained.jsonl`, with which receipts are compared.

Receipts are of the orchestrator, another process. A line has the step, the digests of its batch and of its weights, and the hash
of the newest receipt that was there. It is written before the weights appear, so that no receipt names others. Nothing is
removed: a step that is trained again has a line more. The first line after each admission is on the disk at once: even if the
machine ended and lines were lost, it shows that the steps from there on may have been trained before. So the lines up to that
of a checkpoint, which the next admission repeats, are on the disk before it is.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from counterpoint.run.receipts import RECEIPTS_FILE, head_of, published_weights
from counterpoint.trainer.runs.control_files import run_directory
from counterpoint.transport.files.atomic import flush
from counterpoint.transport.files.json_lines import append_line
from counterpoint.transport.files.untrusted import UntrustedFileError, open_regular

FILE = "trained.jsonl"

MOST_RECEIPT_BYTES = 16 * 2**20
"""The longest line of `receipts.jsonl` that is read: one of a step has 26 bytes a rollout."""

_BLOCK_BYTES = 2**16


def note(output_dir: Path, run_id: str, step: int, batch: str, weights: Path, *, durable: bool) -> None:
    """Appends the line of a step; `batch` is the digest of its batch, and its weights are in the directory `weights`.

    Without a readable `probe.json` there it appends none. Raises `OSError`.
    """
    if (digest := published_weights(weights)) is None:
        return
    head = _newest_head(run_directory(output_dir, run_id) / RECEIPTS_FILE)
    own = output_dir / "trainer" / run_id
    own.mkdir(parents=True, exist_ok=True)
    line = {"step": step, "batch": batch, "weights": digest, "head": head}
    append_line(own / FILE, line, durable=durable)


def _newest_head(path: Path) -> str:
    """Returns the hash of the last whole line; empty without one, or if it is longer than a receipt can be.

    The run wrote the file, and the trainer is that of other runs, too: it reads little of it.
    """
    try:
        file = open_regular(path)
    except (FileNotFoundError, UntrustedFileError):
        return ""
    with file:
        size, length = os.fstat(file.fileno()).st_size, _BLOCK_BYTES
        while True:
            length = min(length, size, MOST_RECEIPT_BYTES)
            whole, _, _ = os.pread(file.fileno(), length, size - length).rpartition(b"\n")
            _, before, line = whole.rpartition(b"\n")
            if line and (before or length == size):
                return head_of(line)
            if length in (size, MOST_RECEIPT_BYTES):
                return ""
            length *= 8


def flush_notes(output_dir: Path, run_id: str) -> None:
    """Waits until the lines of a run are on the disk. Raises `OSError`."""
    with suppress(FileNotFoundError):  # a driven run that publishes nothing has none
        flush(output_dir / "trainer" / run_id / FILE)
