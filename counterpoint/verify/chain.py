"""Reads the chain of receipts: each line's hash must be the next line's `previous`, and steps must rise by one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import chain
from typing import TypeVar

from counterpoint.verify.files import Directory, Unreadable
from counterpoint.verify.formats import ItemReceipt, Receipt, read
from counterpoint.verify.report import BROKEN_CHAIN, Verdict

FILE = "receipts.jsonl"

Kind = TypeVar("Kind", Receipt, ItemReceipt)


def receipts(run: Directory, report: Verdict, head: str | None, kind: type[Kind], newest: int) -> Iterator[Kind]:
    """Yields the receipts in order, and reports what is wrong with the chain; a line that cannot be read ends it.

    `newest` is the last step that certainly has a receipt, by the rest of the directory.
    """
    kept: dict[int, bytes] = {}
    for each in run.steps("checkpoints"):
        # None has it of before there were receipts, nor step 0.
        with report.reading(name := f"checkpoints/step_{each}/receipt.json", each, may_miss=True):
            kept[each] = run.read(name)

    def broken(what: str, number: int) -> None:
        report.damage(FILE, what, number, code=BROKEN_CHAIN)

    former, step = "", 0
    # A kill may have kept the newest lines from the file.
    for line in chain(_lines(run, report), (kept[each] for each in sorted(kept) if each > step)):
        try:
            receipt = read(line, kind)
        except Unreadable as error:
            broken(f"the line after {report.unit} {step}: {error}", step + 1)
            return
        named = f"{report.unit} {receipt.step}"
        if receipt.previous != former:
            broken(f"{named} does not follow the line before it: one was altered, or lines are missing", receipt.step)
        elif step and receipt.step != step + 1:
            broken(f"{named} follows {report.unit} {step}", receipt.step)
        elif not step and receipt.step != 1:
            report.unchecked[f"the {report.unit}s before {receipt.step}, of which there are no receipts"] += 1
        if kept.get(receipt.step, line) != line:
            broken(f"{named} has another receipt in checkpoints/step_{receipt.step}/receipt.json", receipt.step)
        former, step = hashlib.sha256(line).hexdigest(), receipt.step
        report.steps, report.head = report.steps + 1, former
        report.heads.add(former)
        yield receipt
    if head is not None and head not in report.heads:
        broken(f"no receipt has the hash {head}: the chain was altered, or ends too early", step)
    elif head is not None and former != head:
        report.unchecked[f"{report.unit}s after the given head, which pins those before it"] += 1
    if newest > step:
        broken(f"it ends with {report.unit} {step}, and {report.unit} {newest} is there: receipts are missing", newest)


def _lines(run: Directory, report: Verdict) -> Iterator[bytes]:
    with report.reading(FILE, code=BROKEN_CHAIN, may_miss=True):
        yield from run.lines(FILE)
