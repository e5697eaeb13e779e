"""A step's records, `rollouts.jsonl` and `tokens.bin`: reads them, and compares them with the hashes of its receipt."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher
from hashlib import sha256
from io import BytesIO
from itertools import zip_longest

from counterpoint.verify.arrays import completions, frames
from counterpoint.verify.files import Directory
from counterpoint.verify.formats import Played, Receipt, Rules, read
from counterpoint.verify.report import Verdict

DIGITS = 16
"""Hexadecimal digits of a hash that names a part."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step with its receipt: what the checks of it read, and where they report."""

    receipt: Receipt
    recorded: list[Played]
    """The rollouts of the groups that shipped, in order."""
    rules: list[Rules]
    """Those that a rollout may have been finalized by, newest first."""
    report: Verdict

    def damage(self, what: str, rollout: str | None = None, file: str = "rollouts.jsonl") -> None:
        """Adds a finding about a file of the step."""
        self.report.damage(f"rollouts/step_{self.receipt.step}/{file}", what, self.receipt.step, rollout)


def read_records(run: Directory, receipt: Receipt, report: Verdict) -> list[Played] | None:
    """Returns a step's recorded rollouts, in order, or None if they are damaged or were not kept. Reports damage."""
    directory, step, before = f"rollouts/step_{receipt.step}", receipt.step, report.total
    if not run.has(directory):
        report.unchecked["records of a step that was not kept"] += 1
        return None
    name, of_tokens = f"{directory}/rollouts.jsonl", f"{directory}/tokens.bin"
    lines: list[bytes] = []
    parts: list[memoryview] = []
    found: list[Played] = []
    expected = [each[DIGITS:] for each in receipt.rollouts if len(each) > DIGITS]
    with report.reading(name, step):
        lines += BytesIO(run.read(name))
    with report.reading(of_tokens, step):
        parts += frames(memoryview(run.read(of_tokens))) if expected else []
    for number, line in enumerate(lines, 1):
        with report.reading(f"{name}, part {number}", step):
            found.append(read(line, Played))
    names = [each.rollout_id for each in found] if len(found) == len(lines) else []
    of_lines, of_parts = ([sha256(part).digest() for part in each] for each in (lines, parts))
    _compare(report, name, step, of_lines, [each[:DIGITS] for each in receipt.rollouts], names)
    _compare(report, of_tokens, step, of_parts, expected, names)
    whole = b"".join(part for pair in zip_longest(of_lines, of_parts, fillvalue=b"") for part in pair)
    if report.total == before and sha256(whole).hexdigest() != receipt.records:
        report.damage(of_tokens if parts else name, "the hash of the step's records is not the receipt's", step)
    report.checked["records of steps"] += 1
    report.checked["rollouts"] += len(lines)
    if report.total != before:
        return None
    for each, part in zip_longest(found, parts):
        each.tokens = None
        with report.reading(of_tokens, step):
            each.tokens = completions(part) if part else None
    return found


def _compare(report: Verdict, file: str, step: int, hashes: list[bytes], expected: list[str], names: list[str]) -> None:
    """Reports which parts of a file were altered, moved, doubled, added or removed."""
    found = [each.hex()[:DIGITS] for each in hashes]
    counts, known, missing = Counter(found), {*expected}, {*expected} - {*found}
    for kind, start, stop, first, last in SequenceMatcher(None, expected, found, False).get_opcodes():
        for index in range(first, last if kind != "equal" else first):
            if (each := found[index]) in known:
                what = "is there twice" if counts[each] > 1 else "is not in its place"
            else:
                is_altered = stop - start == last - first
                what = "was altered" if is_altered else "is in no receipt"
                missing -= {*expected[start:stop]} if is_altered else set()
            report.damage(file, f"part {index + 1} {what}", step, names[index] if index < len(names) else None)
    for index, each in enumerate(expected):
        if each in missing:
            report.damage(file, f"part {index + 1} of the receipt is missing", step)
