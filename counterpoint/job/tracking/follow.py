"""Follows the metrics files of all runs of a job, guests included, and keeps how far they were sent in a file of its own.

After a restart the steps are read from their beginning, and those that the sink has are left out. The state says which lines of
the trainer's they came from, to notice that one was trained again, and where the results of evaluations begin that were not sent.
It is written after what it describes was flushed at the sink.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable
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
from counterpoint.transport.files.place import Place
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json

logger = logging.getLogger(__name__)

MOST_STATE_BYTES = 64 * 2**20


class SinkState:
    """What is known of a sink after a restart: its identity at the sink, and what `Followed.state` says of each run."""

    def __init__(self, path: Path) -> None:
        """Reads the state. Without it, or if it is damaged, W&B goes on after its last step, the others begin anew."""
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
            self.content = {"identity": secrets.token_hex(4), "runs": {}}

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
        checksums = {int(step): int(value) for step, value in state.get("checksums", {}).items()}
        self.shipped = AppendedLines(run_dir / "metrics.jsonl")
        # A sink that has less than was flushed lost results, too: all are read again.
        place = Place.restored(state.get("results")) if last >= int(state.get("step", 0)) else None
        self.results = AppendedLines(run_dir / EVALUATIONS_FILE, place=place)
        self.feed = Feed(run_id, last=last, checksums=checksums)
        self._control = run_dir / "control"

    def read(self) -> bool:
        """Reads what is new in the run's own files; returns whether there was something."""
        self.feed.orchestrated = self.feed.orchestrated or self._control.is_dir() or self.shipped.path.exists()
        lines = self.shipped.next_lines(self.feed.forget_shipped)
        for line in lines:
            self.feed.add_shipped(line.text)
        results = self.results.next_lines(self.feed.results.clear)
        for line in results:
            self.feed.add_result(line)
        return bool(lines or results)

    def state(self) -> dict[str, Any]:
        """Returns what a restart needs."""
        waiting = [place for place, _ in self.feed.results]
        first = min(waiting, key=lambda place: place.offset, default=self.results.place)
        return {"step": self.feed.last, "results": first.saved(), "checksums": self.feed.checksums}


class JobFollower:
    """All runs of a job."""

    def __init__(self, directory: Path, state: SinkState, last_step: Callable[[str, int], int]) -> None:
        """`last_step` asks the sink for its last step of a run: `Sink.last_step`."""
        self._directory = directory
        self._state = state
        self._last_step = last_step
        self._trainer = AppendedLines(directory / "trainer" / "metrics.jsonl")
        self._unreadable: set[str] = set()
        self.runs: dict[str, Followed] = {}
        for run_id in state.content["runs"]:
            self._run(run_id)

    def read(self) -> bool:
        """Reads what is new in all files, a bounded part of each; returns whether there was something."""
        fresh = self._try(self._read_trainer, self._trainer.path)
        for run_id in run_ids_in(self._directory):
            run = self._run(run_id)
            fresh |= self._try(run.read, run.shipped.path)
        return fresh

    def save(self) -> None:
        """Writes the state; call it once what was handed out is durable at the sink. Raises `OSError`."""
        self._state.content["runs"] = {run_id: run.state() for run_id, run in self.runs.items()}
        self._state.save()

    def _run(self, run_id: str) -> Followed:
        if run_id not in self.runs:
            state = self._state.content["runs"].get(run_id, {})
            last = self._last_step(run_id, int(state.get("step", 0)))
            self.runs[run_id] = Followed(self._directory, run_id, state, last)
        return self.runs[run_id]

    def _read_trainer(self) -> bool:
        lines = self._trainer.next_lines(self._forget_trained)
        for line in lines:
            values = step_of(line.text)
            run_id = values.pop("run_id", "")
            if values and re.fullmatch(IDENTIFIER_PATTERN, run_id):
                self._run(run_id).feed.add_trained(line.text, values)
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
