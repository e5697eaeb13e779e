"""The chain of receipts, `receipts.jsonl`: each has the hash of the line before it.

A receipt is part of the step's commit: its bytes are in the checkpoint (`receipt.json`), and are appended to the file
afterwards, without a flush of their own. A resume restores what the file lacks from the checkpoints (`repair`), and removes
what was not committed, as of `metrics.jsonl`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

import orjson

from counterpoint.orchestrator import metrics
from counterpoint.run.receipts import FORMAT, RECEIPTS_FILE, head_of, newest_receipt, published_weights
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.files.json_lines import append_bytes, read_lines

RECEIPT_FILE = "receipt.json"
"""A step's receipt in its checkpoint."""


class ReceiptChain:
    """The receipts of one run. Blocks when it is made: reads the end of the file. Not for two threads at once."""

    def __init__(self, run_dir: Path, code: Mapping[str, str] | None = None) -> None:
        """`code` are the hashes of the environments' code (`code_of`), which each receipt has."""
        self._path = run_dir / RECEIPTS_FILE
        self._broadcast = run_dir / "broadcast"
        self._head, _ = newest_receipt(self._path)
        self._code = dict(code or {})
        self._seen: dict[int, tuple[int, int]] = {}
        """The broadcasts whose weights a receipt names: inode and time of the last change of `probe.json`, by version."""

    def receipt(self, run_id: str, step: int, facts: dict[str, Any]) -> bytes:
        """Returns the next receipt, without a newline. It is in the chain once `append` has it."""
        head = {"format": FORMAT, "step": step, "run": run_id, "previous": self._head}
        return orjson.dumps(head | facts | {"code": self._code, "weights": self._new_weights()})

    def append(self, receipt: bytes, *, durable: bool) -> None:
        """Appends a committed receipt. Blocks. Raises `OSError`: a resume then restores the line."""
        self._head = head_of(receipt)
        append_bytes(self._path, receipt + b"\n", durable=durable)

    def _new_weights(self) -> dict[str, str]:
        """Returns the digests of the versions that were published since the last receipt and are still there."""
        found: dict[str, str] = {}
        versions = published_steps(self._broadcast)
        for version in versions:
            directory = self._broadcast / f"step_{version}"
            try:
                state = os.stat(directory / "probe.json")
            except FileNotFoundError:
                continue  # the trainer has removed it
            seen = state.st_ino, state.st_mtime_ns
            if self._seen.get(version) != seen and (digest := published_weights(directory)) is not None:
                found[str(version)], self._seen[version] = digest, seen
        self._seen = {version: seen for version, seen in self._seen.items() if version in versions}
        return found


def repair(run_dir: Path, newest_step: int) -> None:
    """Makes the file hold each committed step once, from its first one up to `newest_step`. Raises `OSError`."""
    committed = metrics.newest_committed(run_dir, RECEIPT_FILE)
    path = run_dir / RECEIPTS_FILE
    lines = chain(committed, (line for _, line in read_lines(path)))
    steps = (step for line in islice(lines, len(committed) + 1) if isinstance(step := line.get("step"), int))
    oldest = min(steps, default=None)
    if oldest is not None:  # else a run of before there were receipts; one that was resumed since has some
        metrics.repair(path, newest_step, committed, oldest)
