"""A worker of a sweep whose bodies are watched by a witness that knows nothing of leases, for the chaos and for tests.

The witness is a directory: a log that bodies append their begin and end to, and a file a target that a body locks for as long
as it lives. The kernel drops such a lock when its process dies, however that is, and no sooner: a body that finds it taken
has found another that lives.
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

from sweep.claim import SweepTarget, claim_and_run
from sweep.lock import Claim

Event = Literal["begin", "end", "stopped", "overlap"]


@dataclass(frozen=True, slots=True)
class Witness:
    """Where bodies say that they live."""

    directory: Path

    @contextlib.contextmanager
    def living(self, claim: Claim) -> Iterator[None]:
        """For as long as a body lives."""
        descriptor = os.open(self.directory / f"{claim.target_id}.alive", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._say(claim, "overlap")
            self._say(claim, "begin")
            yield
            self._say(claim, "stopped" if claim.stop.is_set() else "end")
        finally:
            os.close(descriptor)

    def _say(self, claim: Claim, event: Event) -> None:
        line = json.dumps([claim.target_id, claim.token, event, os.getpid()]) + "\n"
        descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(descriptor, line.encode())  # one write: lines never mix
        finally:
            os.close(descriptor)

    @property
    def _log(self) -> Path:
        return self.directory / "witness.jsonl"

    def heard_of(self) -> set[int]:
        """The processes that have said anything."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return {json.loads(line)[3] for line in lines}

    def testimony(self) -> Testimony:
        """What it saw. Nobody may be writing any more."""
        seen = Testimony()
        for line in self._log.read_text().splitlines():
            target_id, token, event, _ = json.loads(line)
            seen.events[event].append((target_id, token))
            if event == "begin":
                seen.begun[target_id].append(token)
        return seen


@dataclass(slots=True)
class Testimony:
    """All that bodies said, in order."""

    events: dict[Event, list[tuple[str, int]]] = field(default_factory=lambda: defaultdict(list))
    """Target and token."""
    begun: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """The tokens under which each target was begun."""

    @property
    def out_of_order(self) -> list[str]:
        """Targets whose tokens did not rise."""
        return [target_id for target_id, tokens in self.begun.items() if tokens != sorted(set(tokens))]


def targets(count: int) -> list[SweepTarget[None]]:
    """So many of them."""
    return [SweepTarget(f"target-{index:05d}", None) for index in range(count)]


def work(root: str, witness: Path, count: int, seconds: float, heartbeat: float, lease: float) -> None:
    """Runs a worker to its end. A body lives for `seconds`, or until it is told to stop."""
    seen_by = Witness(witness)

    def body(target: SweepTarget[None], claim: Claim) -> None:
        with seen_by.living(claim):
            claim.stop.wait(seconds)

    claim_and_run(root, targets(count), body, heartbeat=heartbeat, lease=lease)
