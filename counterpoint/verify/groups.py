"""Checks exactly-once: each group begins once, by the order of data, and ships once, drops out, or is unfinished.

A group's id is its number in the order of draws, over all resumes. Each receipt has the groups that began since the one before,
with their examples, those that shipped, and those that were unfinished after the step. The order of data is computed anew from
`docs/receipts.md`: shuffled epochs, by a Feistel network.
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from itertools import groupby

from counterpoint.verify.chain import FILE
from counterpoint.verify.formats import Examples, Receipt
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
        first = receipt.begun.first
        if self._next is None:
            self._is_whole = receipt.step == 1 and first == 0
        elif first != self._next:
            what = f"its groups begin with {first}; expected {self._next}: data was skipped or drawn twice"
            report.damage(FILE, what, receipt.step)
        for number, (name, example) in enumerate(receipt.begun.examples, first):
            self._open[number] = name, example
            self._check_order(receipt, number, name, example, report)
        self._next = first + len(receipt.begun.examples)
        named: dict[int, tuple[str, int]] = {}
        for number in (*receipt.shipped, *receipt.unfinished):
            if (known := self._open.pop(number, None)) is not None:
                named[number] = known
            elif self._is_whole or number >= first:
                what = f"group {number} ships or is unfinished, and shipped or dropped out before, or never began"
                report.damage(FILE, what, receipt.step)
        # The others were dropped, such as stale or failed ones.
        report.checked["groups that shipped"] += len(receipt.shipped)
        report.checked["groups that dropped out"] += len(self._open)
        self._open = {number: named.pop(number) for number in named.keys() & {*receipt.unfinished} - {*receipt.shipped}}
        return named

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
    for each in step.recorded:
        group, said = each.group_id, (each.environment, each.example_index)
        if said != shipped.get(group, said):
            what = f"it is of example {said[1]} of {said[0]!r}; its group began with {shipped[group]}"
            step.damage(what, each.rollout_id)
    if [group for group, _ in groupby(each.group_id for each in step.recorded)] != step.receipt.shipped:
        step.damage("its groups are not those that shipped, or not in their order")


def example_at(position: int, size: int, key: str) -> int:
    """Returns the example at a position of the stream, from 0. `key` is the run's seed, a slash and the environment's name."""
    epoch, place = divmod(position, size)
    half = (max(size - 1, 1).bit_length() + 1) // 2
    while True:
        left, right = divmod(place, 1 << half)
        for number in range(6):
            noise = blake2b(f"{key}/{epoch}/{number}/{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(noise, "big") & ((1 << half) - 1))
        place = (left << half) + right
        if place < size:
            return place
