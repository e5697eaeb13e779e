"""Reads a step's records, `rollouts.jsonl` and `tokens.bin`, and compares them with the hashes of its receipt."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import sha256

from counterpoint.verify.files import Directory, Unreadable
from counterpoint.verify.formats import Played, Receipt, Recorded, read
from counterpoint.verify.report import Verdict

MOST_BYTES = 2**32
"""Most bytes of a step's file that are read."""

_LENGTH = struct.Struct("<Q")
_DIGITS = 16


def read_records(run: Directory, receipt: Receipt, report: Verdict) -> list[Recorded] | None:
    """Returns a step's recorded rollouts, in order, or None if they are damaged or were not kept. Reports damage."""
    directory, before = f"rollouts/step_{receipt.step}", report.total
    if not run.has(directory):
        report.unchecked["records of a step that was not kept"] += 1
        return None
    name = f"{directory}/rollouts.jsonl"
    lines, found = _parts(name, run.lines, receipt.step, report), []
    names: list[str | None] = []
    for number, part in enumerate(lines, 1):
        try:
            found.append(read(part, Played))
            names.append(found[-1].rollout_id)
        except Unreadable as error:
            report.damage(name, f"part {number}: {error}", receipt.step)
            names.append(None)
    _compare(report, name, receipt.step, lines, [each[:_DIGITS] for each in receipt.rollouts], names)
    frames: list[bytes] = []
    if any(len(each) > _DIGITS for each in receipt.rollouts):
        name = f"{directory}/tokens.bin"
        frames = _parts(name, partial(_frames, run), receipt.step, report)
        _compare(report, name, receipt.step, frames, [each[_DIGITS:] for each in receipt.rollouts], names)
    hashes = [
        sha256(part).digest() for pair in zip(lines, frames or lines, strict=False) for part in pair[: 1 + bool(frames)]
    ]
    if report.total == before and sha256(b"".join(hashes)).hexdigest() != receipt.records:
        report.damage(name, "the hash of the step's records is not the receipt's", receipt.step)
    report.checked["records of steps"] += 1
    report.checked["rollouts"] += len(lines)
    if report.total != before:
        return None
    return [Recorded(line, frames[index] if frames else None) for index, line in enumerate(found)]


def _parts(name: str, parts: Callable[[str], Iterator[bytes]], step: int, report: Verdict) -> list[bytes]:
    """Returns the parts of a file that can be read, and reports others."""
    found: list[bytes] = []
    left = MOST_BYTES
    try:
        for part in parts(name):
            if (left := left - len(part)) < 0:
                raise Unreadable(f"it has more than {MOST_BYTES} bytes")
            found.append(part)
    except FileNotFoundError:
        report.damage(name, "it is missing", step)
    except Unreadable as error:
        report.damage(name, str(error), step)
    return found


def _compare(
    report: Verdict,
    file: str,
    step: int,
    parts: Sequence[bytes],
    expected: Sequence[str],
    names: Sequence[str | None],
) -> None:
    """Reports which parts of a file were altered, moved, doubled, added or removed."""
    places = {each: index for index, each in enumerate(expected)}
    found = [sha256(part).hexdigest()[:_DIGITS] for part in parts]
    missing, seen, latest = set(expected) - set(found), set(), -1
    for index, each in enumerate(found):
        what = ""
        if each in seen:
            what = "is there twice"
        elif each not in places:
            is_altered = index < len(expected) and expected[index] in missing
            what = "was altered" if is_altered else "is in no receipt"
            missing -= set(expected[index : index + 1])
        elif places[each] < latest:
            what = "is not in its place"
        seen.add(each)
        latest = max(latest, places.get(each, -1))
        if what:
            report.damage(file, f"part {index + 1} {what}", step, names[index] if index < len(names) else None)
    for each in sorted(missing, key=places.__getitem__):
        report.damage(file, f"part {places[each] + 1} of the receipt is missing", step)


def _frames(run: Directory, name: str) -> Iterator[bytes]:
    """Yields the frames of a file with their lengths."""
    with run.open(name) as file:
        while head := file.read(_LENGTH.size):
            length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else MOST_BYTES
            body = file.read(min(length, MOST_BYTES))
            if len(body) != length:
                raise Unreadable("it ends within a frame")
            yield head + body
