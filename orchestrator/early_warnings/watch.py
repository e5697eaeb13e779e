"""Applies the rules to each step of a run, and says in its line, once in its log, and to readers what goes wrong since when.

The trainer's metrics come from its file in the job's directory, some steps later than the orchestrator's, or not at all where
that is not at hand.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from counterpoint.orchestrator.early_warnings.rules import Sign, found_in
from counterpoint.orchestrator.early_warnings.seen import Seen
from counterpoint.run.branches import BranchOrigin, origin_of
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.appended_lines import AppendedLines
from counterpoint.transport.files.untrusted import UntrustedFileError, object_in, open_regular
from counterpoint.transport.printable import printable, shortened

logger = logging.getLogger(__name__)

METRIC = "early_warnings"
"""The name of the list in a step's line; absent without any."""

TRAINED_FILE = "trainer/metrics.jsonl"

HEAD_BYTES, END_BYTES = 2**20, 2**25
"""What is read of the beginning and of the end of a file that is met anew."""

QUIET_STEPS = 50
"""Steps within which the log does not say again what went away and came back."""

LONGEST_TEXT, MOST = 600, 40
"""What readers accept: characters of a text, and warnings of a line."""


@dataclass(frozen=True, slots=True)
class EarlyWarning:
    """A sign that a run goes wrong."""

    sign: Sign
    about: str
    figure: float
    reason: str
    advice: str
    since: int
    """The step from which on it has been seen."""
    time: float
    """When that was, in Unix seconds."""

    def __str__(self) -> str:
        about = f"{self.about}: " if self.about else ""
        return f"{self.sign} since step {self.since}: {about}{self.reason}. What to do: {self.advice}"


class Watch:
    """What was seen of one run. Its methods block: call them in a thread."""

    def __init__(
        self,
        output_dir: Path,
        run_id: str,
        paid_parts: Mapping[str, Collection[str]],
        compares_groups: Callable[[], bool],
    ) -> None:
        """Begins with what the files of the run in the job's directory have, at the first line.

        `paid_parts`: by environment with a rubric, the parts that raise the reward. `compares_groups`: tells whether the run
        now learns from the differences within groups alone.
        """
        self._run_id = run_id
        self._paid_parts, self._compares_groups = paid_parts, compares_groups
        self._is_failing = False
        self._own, self._trained = output_dir / f"run_{run_id}" / "metrics.jsonl", output_dir / TRAINED_FILE
        self._following = AppendedLines(self._trained, END_BYTES)
        self._origin: BranchOrigin | None = None
        """Where the run comes from, if it is a branch of the same job: until then that run's figures are its own."""
        self._seen: Seen | None = None
        self._present: dict[tuple[Sign, str], EarlyWarning] = {}
        self._logged: dict[tuple[Sign, str], int] = {}
        """The step at which the log last said each."""

    def take(self, line: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
        """Takes a step's line; returns what to add to it: nothing in a healthy run. Logs what is new. Never raises."""
        try:
            return self._take(line)
        except Exception:
            if not self._is_failing:  # what only warns is no reason to end the run
                logger.warning("the early warnings fail; the run goes on without them", exc_info=True)
            self._is_failing = True
            return {}

    def _take(self, line: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
        if self._seen is None:
            self._seen = Seen(self._paid_parts)
            self._restore(self._seen, line["step"])
        self._seen.add(line)
        self._follow(self._seen)
        before, self._present = self._present, {}
        for found in found_in(self._seen):
            if found.sign is Sign.FEW_DIFFERENCES and not self._compares_groups():
                continue
            key = found.sign, found.about
            began = before.get(key)
            since, time = (began.since, began.time) if began is not None else (line["step"], line.get("time", 0.0))
            self._present[key] = EarlyWarning(
                found.sign, found.about, found.figure, found.reason, found.advice, since, time
            )
            if began is None and line["step"] - self._logged.get(key, -QUIET_STEPS) >= QUIET_STEPS:
                logger.warning("%s", self._present[key])
                self._logged[key] = line["step"]
        return {METRIC: [asdict(each) for each in self._present.values()]} if self._present else {}

    def _restore(self, seen: Seen, step: int) -> None:
        """Takes up the steps before, of an earlier process."""
        try:
            if (origin := origin_of(self._own.parent)) is not None and origin.job is None:
                self._origin = origin
            for line in _lines_of(AppendedLines(self._own, END_BYTES), b"{"):
                if isinstance(before := line.get("step"), int) and before < step:
                    seen.add(line)
                    self._present = {(each.sign, each.about): each for each in read_warnings(line)}
        except (OSError, UntrustedFileError, UserError) as error:
            logger.warning("%s: early warnings begin anew, since it cannot be read: %s", self._own, error)

    def _follow(self, seen: Seen) -> None:
        try:
            having = self._run_id if self._origin is None else ""
            for line in _lines_of(self._following, having.encode()):
                if self._is_own(line):
                    seen.add(line)
        except (OSError, UntrustedFileError) as error:
            logger.warning("%s: early warnings lack its metrics: %s", self._trained, error)

    def _is_own(self, line: Mapping[str, Any]) -> bool:
        run, step, origin = line.get("run_id"), line.get("step"), self._origin
        shared = origin is not None and isinstance(step, int) and run == origin.run and step <= origin.trained
        return run == self._run_id or shared


def _lines_of(lines: AppendedLines, having: bytes) -> Iterator[dict[str, Any]]:
    """Yields the new lines that have these bytes; of a long file that is met anew, of its beginning and of its end."""
    for _, block in lines.new_blocks(lambda: None):
        if lines.left_out:
            with open_regular(lines.path) as file:
                yield from _objects(file.read(HEAD_BYTES).splitlines()[:-1], having)
            lines.left_out = 0
        yield from _objects(block.splitlines(), having)


def _objects(texts: Iterable[bytes], having: bytes) -> Iterator[dict[str, Any]]:
    return (values for text in texts if having in text and (values := object_in(text)) is not None)


def read_warnings(line: Mapping[str, Any]) -> list[EarlyWarning]:
    """Returns the warnings in a line, which anybody may have written; those that cannot be read are left out."""
    listed = line.get(METRIC)
    return [found for each in (listed[:MOST] if isinstance(listed, list) else []) if (found := _read(each)) is not None]


class SaidOfWarnings:
    """The early warnings that a console has said of a run."""

    def __init__(self) -> None:
        self._said: dict[tuple[Sign, str], int] = {}

    def news(self, line: Mapping[str, Any]) -> str:
        """Returns what is new in a step's line, or an empty text. What came back soon is not new."""
        step, present = line.get("step", 0), {(each.sign, each.about): each for each in read_warnings(line)}
        new = [each for key, each in present.items() if step - self._said.get(key, -QUIET_STEPS) >= QUIET_STEPS]
        self._said |= dict.fromkeys(present, step)
        return "; ".join(map(str, new))


def _read(values: Any) -> EarlyWarning | None:
    try:
        about, reason, advice = (
            shortened(printable(str(values[name])), LONGEST_TEXT) for name in ("about", "reason", "advice")
        )
        sign, since = Sign(values["sign"]), int(values["since"])
        figure, time = float(values["figure"]), float(values["time"])
        if not (0 <= since < 2**53 and math.isfinite(figure) and 0 <= time < 1e12):
            return None
        return EarlyWarning(sign, about, figure, reason, advice, since, time)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
