"""The log of decisions about groups, as JSON Lines on disk, for `counterpoint status --why`.

The loop holds decisions in memory, and a thread appends them about once a second. A disk that is full or slow costs only lines,
a kill the newest second. `docs/contracts.md` has the format.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from enum import StrEnum
from pathlib import Path
from typing import Any

from counterpoint.run.loop_health.threads import in_thread
from counterpoint.transport.files.rotated_lines import RotatedLines

DECISIONS_FILE = "decisions.jsonl"
"""File in the run's directory. When it is full it becomes `decisions.jsonl.1`, in place of the former one."""

MAX_BYTES = 8 * 2**20
"""The size of a file: more than 50,000 lines."""

MAX_PENDING = 20_000
"""Decisions held in memory. Beyond this number, the oldest are dropped."""

_FLUSH_SECONDS = 1.0


class Decision(StrEnum):
    """The kind of a line: of a group, or, without a group, of the run."""

    STARTED = "started"
    """A group started: `environment`, `example_index` and the number of `rollouts`. Written again after a resume, for a
    group that had not ended."""
    FINALIZED = "finalized"
    """A group was finalized: the numbers of rollouts `kept`, `filtered` and `failed`."""
    DROPPED = "dropped"
    """A group was dropped: `reason` (`scheduling.outcomes.DropReason`), `detail`, and `step`, the newest step that had
    shipped."""
    SHIPPED = "shipped"
    """A group was shipped in the batch of `step`."""
    DRAINED = "drained"
    """The run was drained at `step`: groups that were in flight start again when it is resumed."""
    CHANGED = "changed"
    """Keys of the run's configuration have new values from `step` on (`control/changes.json`)."""
    PAUSED = "paused"
    """The run was paused after `step`: no group starts until it goes on."""
    CONTINUED = "continued"
    """The run goes on after `step`: its pause is over."""
    RESUMED = "resumed"
    """The run was resumed from its checkpoint of `step`. After a kill, decisions since that checkpoint are undone."""


class DecisionLog:
    """The decisions of one run. Call all but `flush` on the event loop."""

    def __init__(self, run_dir: Path) -> None:
        self._file = RotatedLines(run_dir / DECISIONS_FILE, "decisions", MAX_BYTES)
        self._pending: deque[dict[str, Any]] = deque(maxlen=MAX_PENDING)
        self._lock = threading.Lock()
        """Held while a thread writes."""

    def of_group(self, group_id: int, decision: Decision, **fields: Any) -> None:
        """Adds a decision about a group."""
        self._pending.append({"time": time.time(), "group": group_id, "decision": decision, **fields})

    def of_run(self, decision: Decision, step: int) -> None:
        """Adds an event of the run, such as `PAUSED`."""
        self._pending.append({"time": time.time(), "decision": decision, "step": step})

    async def run(self) -> None:
        """Writes the added lines, again and again, until cancelled."""
        while True:
            await asyncio.sleep(_FLUSH_SECONDS)
            if self._pending:
                await in_thread(self.flush)

    def flush(self) -> None:
        """Writes the added lines. Blocks: call it in a thread. A failure costs the lines, and is logged once."""
        with self._lock:
            self._file.append([self._pending.popleft() for _ in range(len(self._pending))])
