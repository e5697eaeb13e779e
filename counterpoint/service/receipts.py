"""The receipts of a driven run, `run_<id>/receipts.jsonl`: one line for each answered item, with the hash of the line before.

A line follows the answer in the journal, without a flush of its own. Who opens the run again writes the lines that a kill kept
from it, from the journal.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import orjson

from counterpoint.run.receipts import FORMAT, RECEIPTS_FILE, head_of, newest_receipt, published_weights
from counterpoint.service.journal import Journal
from counterpoint.transport.files.json_lines import append_bytes
from counterpoint.transport.messages import Answered


class ItemReceipts:
    """The receipts of one run. Everything blocks: call it in a thread, and not in two at once."""

    def __init__(self, run_id: str, run_dir: Path, journal: Journal) -> None:
        """Writes what is missing of the answers in `journal`. Raises `OSError` and `CodecError`."""
        self._run_id, self._path, self._journal = run_id, run_dir / RECEIPTS_FILE, journal
        self._head, newest = newest_receipt(self._path)
        self._last: int = newest.get("item", 0)
        for number in journal.answers():
            if number > self._last and (answered := journal.read_answer(number)) is not None:
                run_dir.mkdir(parents=True, exist_ok=True)
                self.append(answered)

    def append(self, answered: Answered) -> None:
        """Appends the receipt of an answer that the journal has, once. Raises `OSError`, changing nothing."""
        if answered.number <= self._last:
            return
        receipt = orjson.dumps(
            {
                "format": FORMAT,
                "item": answered.number,
                "run": self._run_id,
                "previous": self._head,
                "asked": _hash_of(self._journal.item_path(answered.number)),
                "answer": _hash_of(self._journal.answer_path(answered.number)),
                "updates": answered.step,
                "fault": answered.fault,
                "weights": _published(answered),
            }
        )
        append_bytes(self._path, receipt + b"\n")
        self._head, self._last = head_of(receipt), answered.number


def _hash_of(path: Path) -> str:
    """Returns SHA-256 of a file, or an empty text if it is gone: an item that nobody can send again."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return ""


def _published(answered: Answered) -> dict[str, str]:
    """Returns by its name the digest of the weights that an item has published, or nothing."""
    if answered.fault or not answered.text:
        return {}
    found = published_weights(directory := Path(answered.text))
    return {} if found is None else {directory.name: found}
