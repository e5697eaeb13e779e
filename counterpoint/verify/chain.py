"""Reads the chain of receipts: each line's hash must be the next line's `previous`, and steps must rise by one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from counterpoint.verify.files import Directory, Unreadable
from counterpoint.verify.formats import Receipt, read
from counterpoint.verify.report import BROKEN_CHAIN, Verdict

FILE = "receipts.jsonl"


def receipts(run: Directory, report: Verdict, head: str | None) -> Iterator[Receipt]:
    """Yields the receipts in order, and reports what is wrong with the chain; a line that cannot be read ends it."""
    found, former, step = False, "", 0
    for line in _committed(run, report):
        try:
            receipt = read(line, Receipt)
        except Unreadable as error:
            report.damage(FILE, f"the line after step {step}: {error}", step + 1, code=BROKEN_CHAIN)
            return
        if receipt.previous != former:
            what = f"the receipt of step {receipt.step} does not follow the line before it: one was altered, or lines are missing"
            report.damage(FILE, what, receipt.step, code=BROKEN_CHAIN)
        elif step and receipt.step != step + 1:
            report.damage(FILE, f"step {receipt.step} follows step {step}", receipt.step, code=BROKEN_CHAIN)
        elif not step and receipt.step != 1:
            report.unchecked[f"the steps before {receipt.step}, of which there are no receipts"] += 1
        former, step = hashlib.sha256(line).hexdigest(), receipt.step
        found |= former == head
        report.steps, report.head = report.steps + 1, former
        yield receipt
    if head is not None and not found:
        what = f"no receipt has the hash {head}: the chain was altered, or ends too early"
        report.damage(FILE, what, step, code=BROKEN_CHAIN)
    elif head is not None and former != head:
        report.unchecked["steps after the given head, which pins those before it"] += 1
    # The records of one more step may be there: they are written before its commit.
    later = max([*run.steps("checkpoints"), *(each - 1 for each in run.steps("rollouts"))], default=0)
    if later > step:
        what = f"it ends with step {step}, and the directory has step {later}: receipts are missing"
        report.damage(FILE, what, later, code=BROKEN_CHAIN)


def _committed(run: Directory, report: Verdict) -> Iterator[bytes]:
    """Yields the lines of the file, and then those of the checkpoints that a kill kept from it; compares both."""
    kept: dict[int, bytes] = {}
    for step in run.steps("checkpoints"):
        name = f"checkpoints/step_{step}/receipt.json"
        with report.reading(name, step, may_miss=True):  # none has it of before there were receipts, nor step 0
            kept[step] = next(run.lines(name), b"")
    newest = 0
    with report.reading(FILE, code=BROKEN_CHAIN, may_miss=True):
        for raw in run.lines(FILE):
            if not raw.endswith(b"\n"):
                report.unchecked["a line that a kill cut short"] += 1
                break
            newest += 1
            try:
                newest = read(raw, Receipt).step
            except Unreadable:
                newest = max(kept, default=0)  # the line is reported by whoever takes it
            if kept.pop(newest, raw[:-1]) != raw[:-1]:
                what = f"the receipt of step {newest} is not that of checkpoints/step_{newest}/receipt.json"
                report.damage(FILE, what, newest, code=BROKEN_CHAIN)
            yield raw[:-1]
    yield from (kept[step] for step in sorted(kept) if step > newest)
