"""Follows the metrics files of all runs of a job, guests included, and keeps how far they were sent in a file of its own.

The state says where reading begins after a restart: at the oldest line that was not sent. It is written after what it describes
was flushed at the sink. If the sink has less than the state says (it lost what was on its way), the files are read from their
beginning, and what the sink has is left out.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from counterpoint.job.directory import run_ids_in
from counterpoint.job.reading.metrics.metrics_lines import step_of
from counterpoint.job.tracking.feed import Feed
from counterpoint.orchestrator.evaluation.lines import EVALUATIONS_FILE
from counterpoint.transport.config import IDENTIFIER_PATTERN
from counterpoint.transport.files.appended_lines import AppendedLines
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.place import BEGINNING, Place
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json

logger = logging.getLogger(__name__)

MOST_STATE_BYTES = 64 * 2**20


class State:
    """What a sink's process knows after a restart: its identity at the sink, and for each run the last step and the offsets."""

    def __init__(self, path: Path) -> None:
        """Reads the state; a missing or damaged file is a new one, from which the sink's own last step still protects."""
        self._path = path
        self._written = b""
        try:
            self.content = read_json(path, MOST_STATE_BYTES)
        except FileNotFoundError:
            self.content = {}
        except UntrustedFileError as error:
            logger.warning("%s; everything is read again", error)
            self.content = {}
        if not isinstance(self.content.get("identity"), str) or not isinstance(self.content.get("runs"), dict):
            self.content = {"identity": secrets.token_hex(4), "trainer": BEGINNING.saved(), "runs": {}}

    def save(self) -> None:
        """Writes it durably if it has changed. Raises `OSError`."""
        data = orjson.dumps(self.content, option=orjson.OPT_NON_STR_KEYS)
        if data != self._written:
            write_atomically(self._path, data)
            self._written = data


class Followed:
    """One run's files and feed."""

    def __init__(self, directory: Path, run_id: str, state: dict[str, Any], last: int) -> None:
        """`last` is the sink's last step."""
        run_dir = directory / f"run_{run_id}"
        is_behind = last < int(state.get("step", 0))
        at = {} if is_behind else state
        checksums = {int(step): int(value) for step, value in state.get("checksums", {}).items()}
        self.is_behind = is_behind
        self.shipped = _reader(run_dir / "metrics.jsonl", at.get("shipped"))
        self.results = _reader(run_dir / EVALUATIONS_FILE, at.get("results"))
        self.feed = Feed(run_id, last=last, checksums=checksums)
        self._control = run_dir / "control"

    def read(self) -> bool:
        """Reads what is new in the run's own files; returns whether there was something."""
        self.feed.orchestrated = self.feed.orchestrated or self._control.is_dir() or self.shipped.path.exists()
        lines = self.shipped.next_lines(self.feed.forget_shipped)
        for line in lines:
            self.feed.add_shipped(line)
        results = self.results.next_lines(self.feed.results.clear)
        for line in results:
            self.feed.add_result(line)
        return bool(lines or results)

    def state(self) -> dict[str, Any]:
        """Returns what a restart needs."""
        held = _first([held.place for held in self.feed.shipped.values()], self.shipped)
        waiting = _first([place for place, _ in self.feed.results], self.results)
        return {
            "step": self.feed.last,
            "shipped": held.saved(),
            "results": waiting.saved(),
            "checksums": self.feed.checksums,
        }


class Follower:
    """All runs of a job."""

    def __init__(self, directory: Path, state: State, last_step: Callable[[str], int]) -> None:
        """`last_step` asks the sink for its last step of a run."""
        self._directory = directory
        self._state = state
        self._last_step = last_step
        self._trainer = _reader(directory / "trainer" / "metrics.jsonl", state.content.get("trainer"))
        self._unreadable: set[str] = set()
        self.runs: dict[str, Followed] = {}
        for run_id in state.content["runs"]:
            self._run(run_id)
        if any(run.is_behind for run in self.runs.values()):
            self._trainer.restart()

    def read(self) -> bool:
        """Reads what is new in all files, a bounded part of each; returns whether there was something."""
        fresh = self._try(self._read_trainer, self._trainer.path)
        for run_id in run_ids_in(self._directory):
            run = self._run(run_id)
            fresh |= self._try(run.read, run.shipped.path)
        return fresh

    def save(self) -> None:
        """Writes the state; call it once what was handed out is durable at the sink. Raises `OSError`."""
        waiting = [held.place for run in self.runs.values() for held in run.feed.trained.values()]
        self._state.content["trainer"] = _first(waiting, self._trainer).saved()
        self._state.content["runs"] = {run_id: run.state() for run_id, run in self.runs.items()}
        self._state.save()

    def _run(self, run_id: str) -> Followed:
        if run_id not in self.runs:
            state = self._state.content["runs"].get(run_id, {})
            self.runs[run_id] = Followed(self._directory, run_id, state, self._last_step(run_id))
        return self.runs[run_id]

    def _read_trainer(self) -> bool:
        lines = self._trainer.next_lines(self._forget_trained)
        for line in lines:
            values = step_of(line.text)
            run_id = values.pop("run_id", "")
            if values and re.fullmatch(IDENTIFIER_PATTERN, run_id):
                self._run(run_id).feed.add_trained(line, values)
        return bool(lines)

    def _forget_trained(self) -> None:
        for run in self.runs.values():
            run.feed.forget_trained()

    def _try(self, read: Callable[[], bool], path: Path) -> bool:
        """Reads; what cannot be read is logged once and tried again at the next pass."""
        try:
            return read()
        except (OSError, UntrustedFileError) as error:
            if str(path) not in self._unreadable:
                self._unreadable.add(str(path))
                logger.warning("%s cannot be read: %s", path, error)
            return False


def _reader(path: Path, saved: object) -> AppendedLines:
    return AppendedLines(path, place=Place.restored(saved))


def _first(waiting: Sequence[Place], read: AppendedLines) -> Place:
    """Returns where reading must begin again: at the first line that waits, or behind all that was read."""
    return min(waiting, key=lambda place: place.offset, default=read.place)
