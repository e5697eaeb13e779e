"""The decisions about a group of rollouts, and why it was dropped, read from its run's decision files.

A guest may have written the files, so every line is checked.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from counterpoint.job.directory import run_ids_in
from counterpoint.orchestrator.decisions import DECISIONS_FILE, Decision
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.rotated_lines import RotatedReader
from counterpoint.transport.files.untrusted import UntrustedFileError, object_in
from counterpoint.transport.printable import shortened

Line = dict[str, Any]
"""One decision (`orchestrator.decisions`): `time`, `decision`, and further fields, which may hold anything."""

READ_BYTES = 16 * 2**20
"""Bytes read from the end of each file; files of our orchestrators are smaller."""

LONGEST_TEXT = 2000
"""Most characters of a field that are shown."""

DROPPED = "dropped"
"""The name that stands for the newest dropped groups."""

SHOWN_DROPS = 20

_GROUP = re.compile(r"(\d{1,18})(-\d+)?")


def explain(directory: Path, name: str) -> dict[str, list[Line]]:
    """Returns the decisions about a group, the oldest first, by run. Runs without such decisions are left out.

    `name` is a group's id, the id of one of its rollouts (`12-3`), or `dropped` for the newest dropped groups. Raises `UserError`
    for another name, and if no run of the job has such a group.
    """
    match = _GROUP.fullmatch(name)
    if match is None and name != DROPPED:
        raise UserError(f"--why {name}: expected a group's id such as 12, a rollout's such as 12-3, or {DROPPED}")
    found: dict[str, list[Line]] = {}
    for run_id in run_ids_in(directory):
        run_dir = directory / f"run_{run_id}"
        try:
            lines = _newest_drops(run_dir) if match is None else _lines_of(run_dir, int(match[1]))
        except (OSError, UntrustedFileError) as error:
            raise UserError(f"the decisions of run {run_id} cannot be read: {error}") from error
        if lines:
            found[run_id] = lines
    if not found:
        what = f"a decision about group {match[1]}" if match else "a dropped group"
        raise UserError(
            f"no run in {directory} has {what}: run_<id>/{DECISIONS_FILE} and {DECISIONS_FILE}.1 hold the newest decisions"
        )
    return found


def describe_decision(line: Line, with_group: bool = False) -> str:
    """Describes a decision with its time."""
    group = f"group {_value(line, 'group')} " if with_group else ""
    return f"{_time(line)}  {group}{_what(line)}"


def _what(line: Line) -> str:
    field = {name: _value(line, name) for name in line}
    match line["decision"]:
        case Decision.STARTED:
            of = f"example {field.get('example_index')} of {field.get('environment')}"
            return f"started: {field.get('rollouts')} rollouts of {of}"
        case Decision.FINALIZED:
            return "finalized: " + ", ".join(f"{field.get(name)} {name}" for name in ("kept", "filtered", "failed"))
        case Decision.DROPPED:
            return f"dropped ({field.get('reason')}): {field.get('detail')}"
        case Decision.SHIPPED:
            return f"shipped in the batch of step {field.get('step')}"
        case Decision.DRAINED:
            return f"the run was stopped after step {field.get('step')}; a resume starts again what was in progress"
        case Decision.RESUMED:
            return f"the run was resumed after step {field.get('step')}, and started again what was in progress"
        case Decision.PAUSED:
            return f"the run was paused after step {field.get('step')}"
        case Decision.CONTINUED:
            return f"the run went on after its pause, after step {field.get('step')}"
        case Decision.CHANGED:
            return f"keys of the configuration have new values from step {field.get('step')} on (control/changes.json)"
        case _:
            return field["decision"]


def _lines_of(run_dir: Path, group_id: int) -> list[Line]:
    """The decisions about a group, with the stops and resumes of its run that concern it."""
    lines: list[Line] = []
    was_drained = False
    for line in _decisions(run_dir):
        if line.get("group") == group_id:
            lines.append(line)
        elif line["decision"] in (Decision.DRAINED, Decision.RESUMED):
            if lines and not _is_settled(lines[-1], line, was_drained):
                lines.append(line)
            was_drained = line["decision"] == Decision.DRAINED
    return lines


def _is_settled(last: Line, of_run: Line, was_drained: bool) -> bool:
    """Whether a group's last decision holds although its run was stopped or resumed.

    After a drain every decision holds; after a kill only those that the checkpoint has.
    """
    if last["decision"] not in (Decision.SHIPPED, Decision.DROPPED):
        return False
    if of_run["decision"] == Decision.DRAINED or was_drained:
        return True
    step, committed = last.get("step"), of_run.get("step")
    if not isinstance(step, int) or not isinstance(committed, int):
        return False
    return step <= committed if last["decision"] == Decision.SHIPPED else step < committed


def _newest_drops(run_dir: Path) -> list[Line]:
    drops = (line for line in _decisions(run_dir) if line["decision"] == Decision.DROPPED)
    return list(deque(drops, maxlen=SHOWN_DROPS))


def new_decisions(reader: RotatedReader) -> Iterator[Line]:
    """Yields the decisions that are new to the reader, the oldest first. Other lines are skipped."""
    for _, block in reader.new_blocks():
        for raw in block.splitlines():
            if (line := object_in(raw)) is not None and isinstance(line.get("decision"), str):
                yield line


def _decisions(run_dir: Path) -> Iterator[Line]:
    return new_decisions(RotatedReader(run_dir / DECISIONS_FILE, READ_BYTES))


def _value(line: Line, name: str) -> str:
    return shortened(" ".join(str(line[name]).split()), LONGEST_TEXT) if name in line else "?"


def _time(line: Line) -> str:
    try:
        return datetime.fromtimestamp(float(line["time"])).strftime("%Y-%m-%d %H:%M:%S")
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return "at an unknown time"
