"""A step's records, `rollouts.jsonl` and `tokens.bin`: reads them, and compares them with the hashes of its receipt."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from hashlib import sha256

from counterpoint.verify.arrays import completions
from counterpoint.verify.files import Directory, Unreadable
from counterpoint.verify.formats import Played, Receipt, Rules, read
from counterpoint.verify.report import Verdict

MOST_BYTES = 2**32
"""Most bytes of a step's file that are read."""

DIGITS = 16
"""Hexadecimal digits of a hash that names a part."""

_LENGTH = struct.Struct("<Q")


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
    directory, before = f"rollouts/step_{receipt.step}", report.total
    if not run.has(directory):
        report.unchecked["records of a step that was not kept"] += 1
        return None
    name = f"{directory}/rollouts.jsonl"
    lines, found = _parts(name, run.lines, receipt.step, report), []
    for number, part in enumerate(lines, 1):
        with report.reading(f"{name}, part {number}", receipt.step):
            found.append(read(part, Played))
    names = [each.rollout_id for each in found] if len(found) == len(lines) else []
    _compare(report, name, receipt.step, lines, [each[:DIGITS] for each in receipt.rollouts], names)
    frames: list[bytes] = []
    if any(len(each) > DIGITS for each in receipt.rollouts):
        name = f"{directory}/tokens.bin"
        frames = _parts(name, partial(_frames, run), receipt.step, report)
        _compare(report, name, receipt.step, frames, [each[DIGITS:] for each in receipt.rollouts], names)
    parts = [part for pair in zip(lines, frames, strict=False) for part in pair] if frames else lines
    hashes = [sha256(part).digest() for part in parts]
    if report.total == before and sha256(b"".join(hashes)).hexdigest() != receipt.records:
        report.damage(name, "the hash of the step's records is not the receipt's", receipt.step)
    report.checked["records of steps"] += 1
    report.checked["rollouts"] += len(lines)
    if report.total != before:
        return None
    for index, each in enumerate(found):
        each.tokens = None
        with report.reading(name, receipt.step):
            each.tokens = completions(frames[index]) if frames else None
    return found


def _parts(name: str, parts: Callable[[str], Iterator[bytes]], step: int, report: Verdict) -> list[bytes]:
    """Returns the parts of a file that can be read, and reports others."""
    found: list[bytes] = []
    left = MOST_BYTES
    with report.reading(name, step):
        for part in parts(name):
            if (left := left - len(part)) < 0:
                raise Unreadable(f"it has more than {MOST_BYTES} bytes")
            found.append(part)
    return found


def _compare(
    report: Verdict, file: str, step: int, parts: Sequence[bytes], expected: Sequence[str], names: Sequence[str]
) -> None:
    """Reports which parts of a file were altered, moved, doubled, added or removed."""
    found = [sha256(part).hexdigest()[:DIGITS] for part in parts]
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


def _frames(run: Directory, name: str) -> Iterator[bytes]:
    """Yields the frames of a file with their lengths."""
    with run.open(name) as file:
        while head := file.read(_LENGTH.size):
            length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else MOST_BYTES
            body = file.read(min(length, MOST_BYTES))
            if len(body) != length:
                raise Unreadable("it ends within a frame")
            yield head + body
