"""The trainer's end of a wire without an orchestrator: batches of data as if they had been received and committed.

The trainer (`trainer/train.py`) then trains, checkpoints, resumes and ends as it does with an orchestrator. Every batch is
committed from the start, since it can be made again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from counterpoint.environments.data.rows import DataError
from counterpoint.transport.messages import Acknowledged, Bye, Commit, Evicted, Hello, Ready, Rejected, ToOrchestrator
from counterpoint.transport.records import Batch


class Feed:
    """A `transport.wires.base.BatchReceiver` that makes the batches of one run, when the trainer has room for them."""

    def __init__(self, run_id: str, steps: int, batch: Callable[[int], Batch]) -> None:
        """`batch` returns the batch of a step; after a `DataError` there are no more."""
        self._run_id = run_id
        self._steps = steps
        self._batch = batch
        self._messages: deque[Hello | Commit | Bye] = deque([Hello(run_id, 0)])
        self._next: int | None = None
        """The step that is sent next; None before `READY` and after the end."""
        self._room = 0
        """The last step that the trainer has room for."""
        self._credit = 0
        self.failure: str | None = None
        """Why the trainer takes nothing more, if it does not."""
        self.fault: DataError | None = None
        """Why there is no further batch, if there is none."""

    def receive(self, timeout: float) -> tuple[str, Hello | Batch | Commit | Bye] | None:
        """See `BatchReceiver`."""
        if self._messages:
            return self._run_id, self._messages.popleft()
        if self._next is not None and self._next <= min(self._room, self._steps):
            try:
                batch = self._batch(self._next)
            except DataError as error:
                self.fault, self._next = error, None
                return None
            self._next += 1
            return self._run_id, batch
        time.sleep(timeout)
        return None

    def take_invalid_batches(self) -> dict[str, str]:
        """See `BatchReceiver`. There are none."""
        return {}

    def send(self, run_id: str, message: ToOrchestrator) -> bool:
        """See `BatchReceiver`."""
        match message:
            case Ready(next_step, credit, session):
                self._next, self._credit, self._room = next_step, credit, next_step - 1 + credit
                self._messages.append(Commit(self._steps, session))
            case Acknowledged(step, durable):
                self._room = max(self._room, step + self._credit)
                if durable >= self._steps and self._next is not None:
                    self._next = None
                    self._messages.append(Bye())
            case Rejected(reason=reason) | Evicted(reason=reason):
                self.failure, self._next = reason, None
        return True

    @property
    def rejected(self) -> int:
        """See `BatchReceiver`."""
        return 0

    def close(self) -> None:
        """See `BatchReceiver`."""
