"""Verifies a run: its chain of receipts, and with each receipt what the directory has of that step, or of a driven run's item."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from counterpoint.verify.advantages import check_advantages
from counterpoint.verify.chain import FILE, receipts
from counterpoint.verify.files import Directory, Unreadable
from counterpoint.verify.formats import ItemReceipt, ProbeFile, Receipt, Rules, Trained, read
from counterpoint.verify.groups import Groups, check_shipped
from counterpoint.verify.records import Step, read_records
from counterpoint.verify.report import BEING_WRITTEN, NO_RECEIPTS, Verdict
from counterpoint.verify.training import check_batch, check_filters, check_turns
from counterpoint.verify.witness import check_trained, check_weights, checkpoints_of

MOST_RULES = 64
"""The rules of a run that a rollout may have been finalized by: the newest ones, since a rollout waits a few steps at most."""


def verify(path: Path, head: str | None = None) -> Verdict:
    """Checks the run in the directory `path` (`run_<id>`). `head` is the hash of a receipt that the chain must have.

    Raises `OSError` if the directory cannot be read.
    """
    run = Directory(path)
    report = Verdict(path.name.removeprefix("run_"))
    if run.is_being_written():
        report.damage(".", "an orchestrator writes this run now; verify it once that has ended", code=BEING_WRITTEN)
        return report
    with suppress(FileNotFoundError, Unreadable):
        if read(next(run.lines(FILE), b""), ItemReceipt):  # else it is the receipt of a step, or none
            _verify_items(path, report, head)
            return report
    groups = Groups()
    rules: list[Rules] = []
    weights: dict[int, list[str]] = {}
    loads: dict[str, int] = {}
    batches: dict[int, str] = {}
    code: dict[str, str] | None = None
    # The records of one more step may be there: they are written before its commit.
    newest = max([*run.steps("checkpoints"), *(each - 1 for each in run.steps("rollouts"))], default=0)
    with report.reading("branch.json", may_miss=True):  # a branch has receipts of its own steps alone
        newest *= newest > read(run.read("branch.json"), Trained).step
    for receipt in receipts(run, report, head, Receipt, newest):
        if receipt.rules not in rules[:1]:
            rules = [receipt.rules, *rules][:MOST_RULES]
        batches[receipt.step] = receipt.batch
        if code not in (None, receipt.code):
            report.unchecked["what a change of an environment's code changed (steps)"] += 1
        code = receipt.code
        for version, digest in receipt.weights.items():
            weights.setdefault(version, []).append(digest)
        shipped = groups.take(receipt, report)
        if (recorded := read_records(run, receipt, report)) is None:
            continue
        step = Step(receipt, [each for each in recorded if each.dropped is None], rules, report)
        try:
            check_shipped(step, shipped)
            check_turns(step, weights, loads)
            check_advantages(step)
            check_filters(step)
            check_batch(run, step)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # values of any size and kind
            step.damage(f"nothing can be computed with it: {error}")
    check_weights(run, weights, report)
    check_trained(path.parent, batches, weights, report)
    if not report.steps and not report.findings:
        what = "this run has no receipts: it is older than these, or has committed no step"
        report.damage(".", what, code=NO_RECEIPTS)
    return report


def _verify_items(path: Path, report: Verdict, head: str | None) -> None:
    """Checks a driven run, also while it goes on: each item was answered once, in order, and is what the journal still has."""
    report.unit = "item"
    journals = f"loops/{report.run}", f"service/models/{report.run}/items"
    place = next((each for each in journals if (path.parent / each).is_dir()), journals[0])
    run, job = Directory(path), Directory(path.parent)
    newest = max(job.numbers(place, "answer_"), default=1) - 1  # a kill may have kept one answer from the chain
    updates: dict[int, int] = {}
    weights: dict[str, str] = {}
    for receipt in receipts(run, report, head, ItemReceipt, newest):
        updates[receipt.step] = receipt.updates
        if receipt.updates - (former := updates.get(receipt.step - 1, receipt.updates)) not in (0, 1):
            what = f"item {receipt.step} has led to update {receipt.updates}, and the one before to {former}"
            report.damage(FILE, what, receipt.step)
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
            is_same = read(run.read(file_name), ProbeFile).digest == digest
            # An item is published before it is answered, and a kill or a look may come between the two.
            report.count(is_same or not is_open, "publications", "publications, maybe of an item without a receipt")
            if not is_same and not is_open:
                report.damage(file_name, "its digests are not those of the newest receipt that published it")
    for file_name, step, made in checkpoints_of(path.parent, report):
        if made.item in updates:
            report.checked["checkpoints of the trainer"] += 1
            if updates[made.item] != made.step:
                what = f"it is of update {made.step} by item {made.item}, whose receipt has {updates[made.item]}"
                report.damage(file_name, what, step)
