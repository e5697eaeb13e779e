"""Checks exactly-once: each group begins once, by the order of data, and ships once, drops out, or is unfinished.

A group's id is its number in the order of draws, over all resumes. Each receipt has the groups that began since the one before,
with their examples, those that shipped, and those that were unfinished after the step.
"""

from __future__ import annotations

from collections import Counter

from counterpoint.verify.chain import FILE
from counterpoint.verify.formats import Examples, Receipt
from counterpoint.verify.order import example_at
from counterpoint.verify.records import Step
from counterpoint.verify.report import Verdict


class Groups:
    """The groups of one run, receipt by receipt."""

    def __init__(self) -> None:
        self._next: int | None = None
        self._open: dict[int, tuple[str, int]] = {}
        self._drawn: Counter[str] = Counter()
        self._is_whole = True
        """Whether every group since the run's beginning has a receipt."""

    def take(self, receipt: Receipt, report: Verdict) -> dict[int, tuple[str, int]]:
        """Checks the groups of the next receipt, and returns environment and example of each shipped one that is known."""
        if self._next is None:
            self._is_whole = receipt.step == 1 and receipt.begun.first == 0
            self._next = receipt.begun.first
        if receipt.begun.first != self._next:
            what = (
                f"its groups begin with {receipt.begun.first}; expected {self._next}: data was skipped or drawn twice"
            )
            report.damage(FILE, what, receipt.step)
        for number, (name, example) in enumerate(receipt.begun.examples, receipt.begun.first):
            self._open[number] = name, example
            self._check_order(receipt, number, name, example, report)
        self._next = receipt.begun.first + len(receipt.begun.examples)
        shipped: dict[int, tuple[str, int]] = {}
        for number in receipt.shipped:
            if (known := self._open.pop(number, None)) is not None:
                shipped[number] = known
            elif self._is_whole or number >= receipt.begun.first:
                report.damage(
                    FILE, f"group {number} ships, and shipped or dropped out before, or never began", receipt.step
                )
        for number in receipt.unfinished:
            if number not in self._open and (self._is_whole or number >= receipt.begun.first):
                report.damage(FILE, f"group {number} is unfinished, and shipped or dropped out before", receipt.step)
        # The others were dropped, such as stale or failed ones.
        unfinished = set(receipt.unfinished)
        report.checked["groups that shipped"] += len(receipt.shipped)
        report.checked["groups that dropped out"] += len(self._open.keys() - unfinished)
        self._open = {number: known for number, known in self._open.items() if number in unfinished}
        return shipped

    def _check_order(self, receipt: Receipt, number: int, name: str, example: int, report: Verdict) -> None:
        described, position = receipt.examples.get(name, Examples(0)), self._drawn[name]
        self._drawn[name] += 1
        if not self._is_whole:
            report.unchecked["the order of data of a run whose first receipts are missing (groups)"] += 1
        elif described.curriculum or "weights" in (described.fingerprint or ""):
            report.unchecked["the order of data of an environment with a curriculum or weights (groups)"] += 1
        elif described.size < 1:
            report.damage(FILE, f"group {number} is of environment {name!r}, whose size is not said", receipt.step)
        elif (expected := example_at(position, described.size, f"{receipt.rules.seed}/{name}")) != example:
            what = f"group {number} has example {example} of {name!r}; the order of data says {expected}"
            report.damage(FILE, what, receipt.step)
        else:
            report.checked["examples in the order of data"] += 1


def check_shipped(step: Step, shipped: dict[int, tuple[str, int]]) -> None:
    """Compares a step's records with the groups that its receipt says to have shipped."""
    found: list[int] = []
    for each in step.recorded:
        group, said = each.group_id, (each.environment, each.example_index)
        found += [group] if found[-1:] != [group] else []
        if said != shipped.get(group, said):
            what = f"it is of example {said[1]} of {said[0]!r}; its group began with {shipped[group]}"
            step.damage(what, each.rollout_id)
    if found != step.receipt.shipped:
        step.damage("its groups are not those that shipped, or not in their order")
