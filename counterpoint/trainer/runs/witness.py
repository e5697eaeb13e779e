"""What the trainer notes of each published step, `trainer/<run_id>/trained.jsonl`, with which receipts are compared.

Receipts are of the orchestrator, another process. A line has the step, the digests of its batch and of its weights, and the hash
of the newest receipt that was there. It is written before the weights appear, so that no receipt names others. Nothing is
removed: a step that is trained again has a line more. The first line after each admission is on the disk at once: even if the
machine ended and lines were lost, it shows that the steps from there on may have been trained before. So the lines up to that
of a checkpoint, which the next admission repeats, are on the disk before it is.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from counterpoint.run.receipts import RECEIPTS_FILE, newest_receipt, published_weights
from counterpoint.trainer.runs.control_files import run_directory
from counterpoint.transport.files.atomic import flush
from counterpoint.transport.files.json_lines import append_line

FILE = "trained.jsonl"


def note(output_dir: Path, run_id: str, step: int, batch: str, weights: Path, *, durable: bool) -> None:
    """Appends the line of a step; `batch` is the digest of its batch, and its weights are in the directory `weights`.

    Without a readable `probe.json` there it appends none. Raises `OSError`.
    """
    if (digest := published_weights(weights)) is None:
        return
    receipts = run_directory(output_dir, run_id) / RECEIPTS_FILE
    head, _ = newest_receipt(receipts) if receipts.is_file() else ("", {})
    own = output_dir / "trainer" / run_id
    own.mkdir(parents=True, exist_ok=True)
    line = {"step": step, "batch": batch, "weights": digest, "head": head}
    append_line(own / FILE, line, durable=durable)


def flush_notes(output_dir: Path, run_id: str) -> None:
    """Waits until the lines of a run are on the disk. Raises `OSError`."""
    with suppress(FileNotFoundError):  # a driven run that publishes nothing has none
        flush(output_dir / "trainer" / run_id / FILE)
