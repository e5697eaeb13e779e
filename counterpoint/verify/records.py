"""Reads a step's records, `rollouts.jsonl` and `tokens.bin`, and compares them with the hashes of its receipt."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from counterpoint.verify.chain import Receipt
from counterpoint.verify.files import Directory, Unreadable, object_of
from counterpoint.verify.report import Report

MOST_FRAME_BYTES = 64 * 2**20

_LENGTH = struct.Struct("<Q")
_DIGITS = 16
_LONG = ("prompt", "completion", "state", "answer", "metrics", "opponent_turns")
"""Parts of a record that no check reads."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One rollout as its line and its frame of tokens have it."""

    name: str
    line: dict[str, Any]
    frame: bytes | None


def read_records(run: Directory, receipt: Receipt, report: Report) -> list[Recorded] | None:
    """Returns a step's recorded rollouts, in order, or None if they are damaged or were not kept. Reports damage."""
    directory = f"rollouts/step_{receipt.step}"
    if not run.has(directory):
        report.unchecked["records of a step that was not kept"] += 1
        return None
    before = report.total
    name, tokens_name = f"{directory}/rollouts.jsonl", f"{directory}/tokens.bin"
    lines: list[dict[str, Any]] = []
    frames: list[bytes] = []
    digests: tuple[list[bytes], list[bytes]] = ([], [])
    try:
        for line in run.lines(name):
            digests[0].append(hashlib.sha256(line).digest())
            lines.append(_shortened(line))
        has_tokens = any(len(each) > _DIGITS for each in receipt.rollouts)
        if has_tokens:
            for frame in _frames(run, tokens_name):
                digests[1].append(hashlib.sha256(frame).digest())
                frames.append(frame)
    except FileNotFoundError as error:
        report.damage(
            name if error.filename is None else f"{directory}/{error.filename}", "it is missing", receipt.step
        )
        return None
    except Unreadable as error:
        report.damage(tokens_name if digests[0] and len(digests[0]) == len(lines) else name, str(error), receipt.step)
        return None
    names = [str(line.get("rollout_id", "?")) for line in lines]
    _compare(report, name, receipt.step, digests[0], [each[:_DIGITS] for each in receipt.rollouts], names)
    if has_tokens:
        _compare(report, tokens_name, receipt.step, digests[1], [each[_DIGITS:] for each in receipt.rollouts], names)
    if report.total == before:
        pairs = zip(digests[0], digests[1] or [b""] * len(lines), strict=True)
        if hashlib.sha256(b"".join(line + frame for line, frame in pairs)).hexdigest() != receipt.records:
            report.damage(name, "its hash and that of tokens.bin are not the receipt's", receipt.step)
    report.checked["records of steps"] += 1
    report.checked["rollouts"] += len(lines)
    if report.total != before:
        return None
    return [
        Recorded(each, line, frames[index] if frames else None)
        for index, (each, line) in enumerate(zip(names, lines, strict=True))
    ]


def _compare(
    report: Report, file: str, step: int, digests: Sequence[bytes], expected: Sequence[str], names: Sequence[str]
) -> None:
    """Reports which parts of a file were altered, moved, doubled, added or removed."""
    found = [digest.hex()[:_DIGITS] for digest in digests]
    if found == list(expected):
        return
    missing = set(expected) - set(found)
    seen: set[str] = set()
    latest = -1
    places = {each: index for index, each in enumerate(expected)}
    for index, each in enumerate(found):
        rollout = names[index] if index < len(names) else None
        if each in seen:
            report.damage(file, f"part {index + 1} is there twice", step, rollout)
        elif each not in places:
            is_altered = index < len(expected) and expected[index] in missing
            report.damage(
                file, f"part {index + 1} {'was altered' if is_altered else 'is in no receipt'}", step, rollout
            )
            missing -= {expected[index]} if is_altered else set()
        elif places[each] < latest:
            report.damage(file, f"part {index + 1} is not in its place", step, rollout)
        seen.add(each)
        latest = max(latest, places.get(each, -1))
    for each in sorted(missing, key=places.__getitem__):
        report.damage(file, f"part {places[each] + 1} of the receipt is missing", step)


def _frames(run: Directory, name: str) -> Iterator[bytes]:
    """Yields the frames of a file with their lengths."""
    with run.open(name) as file:
        while head := file.read(_LENGTH.size):
            length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else MOST_FRAME_BYTES + 1
            if length > MOST_FRAME_BYTES:
                raise Unreadable(f"has a frame that is cut short, or of more than {MOST_FRAME_BYTES} bytes")
            body = file.read(length)
            if len(body) != length:
                raise Unreadable("ends within a frame")
            yield head + body


def _shortened(line: bytes) -> dict[str, Any]:
    """Returns what the checks read of a line; nothing if it is no record, which its hash then shows."""
    try:
        record = object_of(line)
    except Unreadable:
        return {}
    turns = record.get("turns")
    if isinstance(turns, list):
        record["turns"] = [
            {key: value for key, value in turn.items() if key not in _LONG} for turn in turns if isinstance(turn, dict)
        ]
    return {key: value for key, value in record.items() if key not in _LONG}
