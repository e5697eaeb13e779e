"""A worker of a sweep whose bodies are watched by a witness that does not use leases, for the chaos and for tests.

The witness is a directory: a log to which bodies append begin and end, and a file for each target, locked by a body while it
lives. The kernel drops such a lock when its process ends, and no sooner: if the lock is taken, another body lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from counterpoint.sweep.claim import SweepTarget, claim_and_run
from counterpoint.sweep.lock import Claim
from perf.chaos.disk import json_lines

Event = Literal["begin", "end", "stopped", "overlap"]


@dataclass(frozen=True, slots=True)
class Witness:
    """The directory in which bodies record that they live."""

    directory: Path

    @contextlib.contextmanager
    def living(self, claim: Claim) -> Iterator[None]:
        """Records a body for as long as the block lasts."""
        descriptor = os.open(self.directory / f"{claim.target_id}.alive", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._record(claim, "overlap")
            self._record(claim, "begin")
            yield
            self._record(claim, "stopped" if claim.stop.is_set() else "end")
        finally:
            os.close(descriptor)

    def _record(self, claim: Claim, event: Event) -> None:
        line = json.dumps([claim.target_id, claim.token, event, os.getpid()]) + "\n"
        descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(descriptor, line.encode())  # one write: lines never mix
        finally:
            os.close(descriptor)

    @property
    def _log(self) -> Path:
        return self.directory / "witness.jsonl"

    def recorded_processes(self) -> set[int]:
        """Returns the ids of the processes that have recorded anything."""
        return {process for _, _, _, process in json_lines(self._log)}

    def testimony(self) -> Testimony:
        """Returns all records. No process may be writing any more."""
        seen = Testimony()
        for target_id, token, event, _ in json_lines(self._log):
            seen.events[event].append((target_id, token))
            if event == "begin":
                seen.begun[target_id].append(token)
        return seen


@dataclass(slots=True)
class Testimony:
    """The records of bodies, in order."""

    events: dict[Event, list[tuple[str, int]]] = field(default_factory=lambda: defaultdict(list))
    """Target and token, by event."""
    begun: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """The tokens under which each target was begun."""

    @property
    def out_of_order(self) -> list[str]:
        """Targets whose tokens did not rise."""
        return [target_id for target_id, tokens in self.begun.items() if tokens != sorted(set(tokens))]


def targets(count: int) -> list[SweepTarget[None]]:
    """Returns so many targets."""
    return [SweepTarget(f"target-{index:05d}", None) for index in range(count)]


def work(root: str, witness: Path, count: int, seconds: float, heartbeat: float, lease: float) -> None:
    """Runs a worker to its end. A body lives for `seconds`, or until it is asked to stop."""
    seen_by = Witness(witness)

    def body(target: SweepTarget[None], claim: Claim) -> None:
        with seen_by.living(claim):
            claim.stop.wait(seconds)

    claim_and_run(root, targets(count), body, keep_going=True, heartbeat=heartbeat, lease=lease)
