"""Verifies a driven run: each item that a client asked for was answered once, in order, and is what the journal still has."""

from __future__ import annotations

import hashlib
from pathlib import Path

from counterpoint.verify.chain import FILE, receipts
from counterpoint.verify.files import Directory
from counterpoint.verify.formats import ItemReceipt, ProbeFile, read
from counterpoint.verify.report import Verdict
from counterpoint.verify.witness import checkpoints_of


def verify_items(path: Path, report: Verdict, head: str | None) -> None:
    """Checks the driven run in the directory `path`, also while it goes on."""
    report.unit = "item"
    journals = f"loops/{report.run}", f"service/models/{report.run}/items"
    place = next((each for each in journals if (path.parent / each).is_dir()), journals[0])
    run, job = Directory(path), Directory(path.parent)
    newest = max(job.numbers(place, "answer_"), default=1) - 1  # a kill may have kept one answer from the chain
    former: int | None = None
    updates: dict[int, int] = {}
    weights: dict[str, str] = {}
    for receipt in receipts(run, report, head, ItemReceipt, newest):
        if former is not None and receipt.updates - former not in (0, 1):
            what = f"item {receipt.step} has led to update {receipt.updates}, and the one before to {former}"
            report.damage(FILE, what, receipt.step)
        former = updates[receipt.step] = receipt.updates
        weights |= receipt.weights
        for name, said in ((f"item_{receipt.step}", receipt.asked), (f"answer_{receipt.step}", receipt.answer)):
            is_there = job.has(f"{place}/{name}")
            report.count(is_there, "items and answers", "items and answers that were removed since")
            with report.reading(f"{place}/{name}", receipt.step, may_miss=True), job.open(f"{place}/{name}") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != said:
                    report.damage(f"{place}/{name}", "it is not the one of the receipt", receipt.step)
    is_open = max(job.numbers(place, "item_"), default=0) > max(updates, default=0)
    for name, digest in weights.items():
        # The name is a link to the newest of these.
        places = run.numbers("published", f".{name}.")
        file_name = f"published/{f'.{name}.{places[-1]}' if places else name}/probe.json"
        with report.reading(file_name, may_miss=True):
            is_same = read(next(run.lines(file_name), b""), ProbeFile).digest == digest
            # An item is published before it is answered, and a kill or a look may come between the two.
            report.count(is_same or not is_open, "publications", "publications, maybe of an item without a receipt")
            if not is_same and not is_open:
                report.damage(file_name, "its digests are not those of the newest receipt that published it")
    for step, file_name, made in checkpoints_of(path.parent, report):
        if made.item in updates:
            report.checked["checkpoints of the trainer"] += 1
            if updates[made.item] != made.step:
                what = f"it is of update {made.step} by item {made.item}, whose receipt has {updates[made.item]}"
                report.damage(file_name, what, step)
