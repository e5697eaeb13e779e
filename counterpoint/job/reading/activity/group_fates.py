"""What became of a run's groups, step by step: shipped, or dropped and why, as `decisions.jsonl` tells.

`orchestrator/decisions.py` writes that. A group that was dropped between two steps counts for the later one. After a kill the run
goes back to its checkpoint, and what was decided since is undone. Only the newest steps are kept, and of the newest of these a
bounded number of groups.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from counterpoint.job.reading.activity.span_files import NEWEST_BYTES
from counterpoint.job.reading.activity.why import new_decisions
from counterpoint.job.reading.rollouts.rollout_records import finite_number
from counterpoint.orchestrator.decisions import DECISIONS_FILE, Decision
from counterpoint.transport.files.rotated_lines import RotatedReader
from counterpoint.transport.files.untrusted import UntrustedFileError
from counterpoint.transport.printable import clipped

MAX_STEPS = 2_000
"""The newest, that are kept."""

MAX_GROUPS = 256
"""Groups of one step that are kept one by one; all are counted."""

MAX_STEPS_WITH_GROUPS = 200
"""The newest steps, of which single groups are kept."""

MAX_OPEN = 100_000
"""Groups that are neither shipped nor dropped; the oldest are forgotten first."""

MAX_REASONS = 32
"""The reasons of one step."""

MAX_TEXT = 300

_LARGEST = 2**53


@dataclass(slots=True)
class GroupFate:
    """One group."""

    group: int
    environment: str = ""
    example_index: int | None = None
    rollouts: int | None = None
    kept: int | None = None
    filtered: int | None = None
    failed: int | None = None
    reason: str = ""
    """Why it was dropped; empty if it was not."""
    detail: str = ""
    started: float | None = None
    """The time of its start, in Unix seconds."""
    ended: float | None = None


@dataclass(slots=True)
class StepFates:
    """What became of groups on the way to one step."""

    step: int
    groups_shipped: int = 0
    rollouts_kept: int = 0
    rollouts_filtered: int = 0
    rollouts_failed: int = 0
    """The rollouts are those of the shipped groups."""
    dropped: Counter[str] = field(default_factory=Counter)
    """The number of groups that were dropped, by reason."""
    groups: list[GroupFate] = field(default_factory=list)
    left_out: int = 0


class GroupFates:
    """The groups of one run. Not for several threads at once (`Jobs.reading`)."""

    def __init__(self, directory: Path, run: str) -> None:
        """`directory` is the job's."""
        self._reader = RotatedReader(directory / f"run_{run}" / DECISIONS_FILE, NEWEST_BYTES)
        self._open: OrderedDict[int, GroupFate] = OrderedDict()
        self._steps: dict[int, StepFates] = {}

    def update(self) -> None:
        """Reads what was decided since the last call; nothing, while a file is there that cannot be read."""
        with suppress(OSError, UntrustedFileError):
            for line in new_decisions(self._reader):
                self._take(line)

    @property
    def in_flight(self) -> int:
        """Groups that have started and have neither shipped nor been dropped."""
        return len(self._open)

    def steps(self) -> list[StepFates]:
        """Returns the steps, ascending. The last one may not have shipped yet."""
        return [self._steps[step] for step in sorted(self._steps)]

    def step(self, step: int) -> StepFates | None:
        """Returns one of them."""
        return self._steps.get(step)

    def _take(self, line: Mapping[str, Any]) -> None:
        decision, group, step = line.get("decision"), _whole(line.get("group")), _whole(line.get("step"))
        if group is None:
            if decision == Decision.RESUMED and step is not None:
                self._steps = {number: fates for number, fates in self._steps.items() if number <= step}
            return
        if decision == Decision.STARTED:
            self._start(group, line)
        elif decision == Decision.FINALIZED and group in self._open:
            fate = self._open[group]
            fate.kept, fate.filtered, fate.failed = (_whole(line.get(key)) for key in ("kept", "filtered", "failed"))
        elif decision in (Decision.SHIPPED, Decision.DROPPED) and step is not None:
            fate = self._open.pop(group) if group in self._open else GroupFate(group)
            fate.ended = _time(line)
            fates = self._at(step + (decision == Decision.DROPPED))
            if decision == Decision.SHIPPED:
                fates.groups_shipped += 1
                fates.rollouts_kept += fate.kept or 0
                fates.rollouts_filtered += fate.filtered or 0
                fates.rollouts_failed += fate.failed or 0
            else:
                fate.reason, fate.detail = _text(line.get("reason")) or "unknown", _text(line.get("detail"))
                known = fate.reason in fates.dropped or len(fates.dropped) < MAX_REASONS
                fates.dropped[fate.reason if known else "other"] += 1
            if len(fates.groups) < MAX_GROUPS:
                fates.groups.append(fate)
            else:
                fates.left_out += 1

    def _start(self, group: int, line: Mapping[str, Any]) -> None:
        # Again after a resume: it is the newest then.
        self._open[group] = GroupFate(
            group,
            _text(line.get("environment")),
            _whole(line.get("example_index")),
            _whole(line.get("rollouts")),
            started=_time(line),
        )
        self._open.move_to_end(group)
        if len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)

    def _at(self, step: int) -> StepFates:
        fates = self._steps.get(step)
        if fates is None:
            fates = self._steps[step] = StepFates(step)
            ordered = sorted(self._steps)
            for old in ordered[:-MAX_STEPS_WITH_GROUPS]:
                forgotten = self._steps[old]
                forgotten.left_out += len(forgotten.groups)
                forgotten.groups = []
            if len(ordered) > MAX_STEPS:
                del self._steps[ordered[0]]
        return fates


def _whole(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= _LARGEST else None


def _time(line: Mapping[str, Any]) -> float | None:
    value = finite_number(line.get("time"))
    return value if value is not None and 0 <= value <= _LARGEST else None


def _text(value: object) -> str:
    return clipped(value, MAX_TEXT) if isinstance(value, str) else ""
