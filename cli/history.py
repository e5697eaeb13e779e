"""What a run has done so far, read from its metrics file and its trainer's, as they grow.

Progress, summary, curves and `status` all look through this one window.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from orchestrator.losses import LOSSES_FILE

Line = dict[str, Any]
"""One step's metrics, by the names of the design's section 5."""


@dataclass(slots=True)
class _Follower:
    """Reads the whole lines that a JSON Lines file has gained since the last look."""

    path: Path
    _offset: int = 0
    _inode: int = 0

    def new_lines(self) -> tuple[bool, list[Line]]:
        """Whether the file was replaced, as by a resume that takes steps back, and its new lines: then, all. One that is no
        step, as a machine's end leaves it, is passed over; its orchestrator says so when it repairs the file."""
        try:
            with open(self.path, "rb") as file:
                stat = os.fstat(file.fileno())
                replaced = stat.st_ino != self._inode or stat.st_size < self._offset
                if replaced:
                    self._inode, self._offset = stat.st_ino, 0
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return False, []
        self._offset += len(whole) + len(newline)
        return replaced, [step for line in whole.splitlines() if (step := _step(line))]


def _step(text: bytes) -> Line:
    """The object in the text if it is a step's; else empty."""
    try:
        line = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return line if isinstance(line, dict) and {"step", "time"} <= line.keys() else {}


@dataclass(slots=True)
class History:
    """The steps of one run, as its orchestrator shipped them and as the trainer trained them."""

    run_id: str
    steps: int | None = None
    """How many it is to have; None where nobody said."""
    shipped: dict[int, Line] = field(default_factory=dict)
    trained: dict[int, Line] = field(default_factory=dict)
    since: float = 0.0
    """When this invocation of the job began, in Unix seconds: rates leave out the steps before it, and the pause."""
    lost: Line = field(default_factory=dict)
    """What the run says it has lost since the last shipped step (`orchestrator.losses.Report`); empty where it says nothing."""
    _losses_file: Path = Path()
    _followers: list[tuple[_Follower, dict[int, Line]]] = field(default_factory=list)

    @classmethod
    def of(cls, output_dir: Path, run_id: str, steps: int | None = None, since: float = 0.0) -> History:
        """The history of `run_<id>` in a job's directory; empty until `refresh`."""
        history = cls(run_id, steps, since=since, _losses_file=output_dir / f"run_{run_id}" / LOSSES_FILE)
        history._followers = [
            (_Follower(output_dir / f"run_{run_id}" / "metrics.jsonl"), history.shipped),
            (_Follower(output_dir / "trainer" / "metrics.jsonl"), history.trained),
        ]
        return history

    def refresh(self) -> list[Line]:
        """Takes in what is new; returns the newly shipped steps."""
        fresh: list[Line] = []
        for follower, steps in self._followers:
            replaced, lines = follower.new_lines()
            known = set(steps)
            if replaced:
                steps.clear()
            for line in lines:
                if line.get("run_id", self.run_id) != self.run_id:  # the trainer's file is of all its runs
                    continue
                if steps is self.shipped and line["step"] not in known:
                    fresh.append(line)
                steps[line["step"]] = line
        report = self._read_losses()
        self.lost = report if report.get("step") == max(self.shipped, default=0) else {}
        return fresh

    def _read_losses(self) -> Line:
        try:
            report: Line = orjson.loads(self._losses_file.read_bytes())
        except (FileNotFoundError, orjson.JSONDecodeError):
            return {}
        return report

    @property
    def step(self) -> int:
        """The newest shipped step; 0 before the first."""
        return max(self.shipped, default=0)

    @property
    def complete(self) -> bool:
        """Whether all the steps it is to have are shipped and trained."""
        return self.steps is not None and min(self.step, max(self.trained, default=0)) >= self.steps

    @property
    def so_far(self) -> str:
        """`7/20`; `7/?` where nobody said how many it is to be."""
        return f"{self.step}/{self.steps or '?'}"

    @property
    def last_shipped(self) -> Line:
        """The newest shipped step's line; empty before the first."""
        return self.shipped[max(self.shipped)] if self.shipped else {}

    @property
    def last_trained(self) -> Line:
        """The newest trained step's line; empty before the first."""
        return self.trained[max(self.trained)] if self.trained else {}

    def series(self, name: str) -> list[tuple[int, float]]:
        """A metric over steps, from whichever of the two files has it; steps without it are left out."""
        lines = self.shipped if any(name in line for line in self.shipped.values()) else self.trained
        return [(step, float(lines[step][name])) for step in sorted(lines) if lines[step].get(name) is not None]

    def tokens_per_second(self, steps: int | None = None) -> float | None:
        """Completion tokens a second, over the last `steps` steps, or all, of this invocation; pauses between sessions are left
        out."""
        lines = [line for _, line in sorted(self.shipped.items())]
        tokens, seconds = 0, 0.0
        for before, line in list(zip([{}, *lines], lines, strict=False))[-steps if steps else None :]:
            took = _seconds(line, before)
            if took is not None and line["time"] - took >= self.since:
                tokens += line.get("tokens/completion", 0)
                seconds += took
        return tokens / seconds if seconds > 0 else None


def _seconds(line: Line, before: Line) -> float | None:
    """How long a step took: since the one before, or since its session began to generate if that is later; None if not known."""
    known = [line["uptime_seconds"]] if "uptime_seconds" in line else []
    if before:
        known.append(line["time"] - before["time"])
    return min(known, default=None)
