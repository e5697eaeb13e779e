"""Reads the chain of receipts: each line's hash must be the next line's `previous`, and steps must rise by one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from counterpoint.verify.files import Directory, Unreadable, object_of
from counterpoint.verify.report import BROKEN_CHAIN, Report

FILE = "receipts.jsonl"

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Receipt:
    """One step's receipt, of the types that the format says."""

    step: int
    run: str
    previous: str
    batch: str
    configuration: str
    rules: dict[str, Any]
    shipped: list[int]
    first_begun: int
    begun: list[tuple[str, int]]
    unfinished: list[int]
    examples: dict[str, dict[str, Any]]
    records: str
    rollouts: list[str]
    weights: dict[str, str]


def receipts(run: Directory, report: Report, head: str | None) -> Iterator[Receipt]:
    """Yields the receipts in order, and reports what is wrong with the chain; a line that cannot be read ends it."""
    found, former, step = False, "", 0
    for line in _committed(run, report):
        try:
            receipt = _receipt(object_of(line))
        except (Unreadable, TypeError, ValueError, KeyError) as error:
            report.damage(FILE, f"the line after step {step} is no receipt: {error}", step + 1, code=BROKEN_CHAIN)
            return
        if receipt.previous != former:
            what = f"the receipt of step {receipt.step} does not follow the line before it: one was altered, or lines are missing"
            report.damage(FILE, what, receipt.step, code=BROKEN_CHAIN)
        elif step and receipt.step != step + 1:
            report.damage(FILE, f"step {receipt.step} follows step {step}", receipt.step, code=BROKEN_CHAIN)
        elif not step and receipt.step != 1:
            report.unchecked[f"the steps before {receipt.step}, of which there are no receipts"] += 1
        former, step = hash_of(line), receipt.step
        found |= former == head
        report.steps, report.head = report.steps + 1, former
        yield receipt
    if head is not None and not found:
        report.damage(
            FILE, f"no receipt has the hash {head}: the chain was altered, or ends too early", step, code=BROKEN_CHAIN
        )
    elif head is not None and former != head:
        report.unchecked["steps after the given head, which pins those before it"] += 1
    _beyond(run, report, step)


def _committed(run: Directory, report: Report) -> Iterator[bytes]:
    """Yields the lines of the file, and then those of the checkpoints that a kill kept from it; compares both."""
    kept: dict[int, bytes] = {}
    for step in run.steps("checkpoints"):
        name = f"checkpoints/step_{step}/receipt.json"
        if run.has(name):
            try:
                kept[step] = next(run.lines(name), b"")
            except (Unreadable, FileNotFoundError) as error:
                report.damage(name, str(error), step)
    newest = 0
    try:
        for raw in run.lines(FILE):
            if not raw.endswith(b"\n"):
                report.unchecked["a line that a kill cut short"] += 1
                break
            line = raw[:-1]
            newest = _step_of(line, newest)
            if newest in kept and kept.pop(newest) != line:
                name = f"checkpoints/step_{newest}/receipt.json"
                report.damage(FILE, f"the receipt of step {newest} is not that of {name}", newest, code=BROKEN_CHAIN)
            yield line
    except FileNotFoundError:
        pass
    except Unreadable as error:
        report.damage(FILE, str(error), code=BROKEN_CHAIN)
    yield from (kept[step] for step in sorted(kept) if step > newest)


def _step_of(line: bytes, default: int) -> int:
    try:
        step = object_of(line).get("step")
    except Unreadable:
        return default
    return step if isinstance(step, int) else default


def _beyond(run: Directory, report: Report, step: int) -> None:
    """Reports steps of which the directory has more than the chain."""
    later = [each for each in run.steps("checkpoints") if each > step]
    # The records of one more step may be there: they are written before its commit.
    later += [each for each in run.steps("rollouts") if each > step + 1]
    if later:
        what = f"it ends with step {step}, and the directory has step {max(later)}: receipts are missing"
        report.damage(FILE, what, max(later), code=BROKEN_CHAIN)


def hash_of(line: bytes) -> str:
    """Returns the hash of a receipt's line without its newline."""
    return hashlib.sha256(line).hexdigest()


def _receipt(values: dict[str, Any]) -> Receipt:
    if values.get("format") != FORMAT:
        raise ValueError(f"its format is {values.get('format')!r:.40}; this checker reads {FORMAT}")
    begun = values["begun"]
    return Receipt(
        step=_typed(values["step"], int),
        run=_typed(values["run"], str),
        previous=_typed(values["previous"], str),
        batch=_typed(values["batch"], str),
        configuration=_typed(values["configuration"], str),
        rules=_typed(values["rules"], dict),
        shipped=_list(values["shipped"], int),
        first_begun=_typed(begun["first"], int),
        begun=[(_typed(name, str), _typed(example, int)) for name, example in begun["examples"]],
        unfinished=_list(values["unfinished"], int),
        examples={name: _typed(each, dict) for name, each in _typed(values["examples"], dict).items()},
        records=_typed(values["records"], str),
        rollouts=_list(values["rollouts"], str),
        weights={name: _typed(each, str) for name, each in _typed(values["weights"], dict).items()},
    )


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{str(value)[:40]!r} stands where {kind.__name__} is expected")
    return value


def _list(values: Any, kind: type) -> Any:
    return [_typed(each, kind) for each in _typed(values, list)]
