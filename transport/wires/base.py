"""Where the trainer's batches come from: the wire (`receiver.py`), or data."""

from __future__ import annotations

from typing import Protocol

from counterpoint.transport.messages import Ask, Bye, Commit, Hello, ToOrchestrator
from counterpoint.transport.records import Batch


class BatchReceiver(Protocol):
    """The trainer's end of the wire."""

    def receive(self, timeout: float) -> tuple[str, Hello | Batch | Ask | Commit | Bye] | None:
        """Returns the next valid message with its run id, or None after `timeout` seconds.

        An invalid message is counted, logged with its sender, answered with `Rejected`, and never returned. A batch or
        commit of another session than that of the last `Ready` sent to its run is dropped without an answer. None may also
        be returned early, so that a flood of dropped messages cannot keep the caller here.
        """

    def take_invalid_batches(self) -> dict[str, str]:
        """Returns the runs that sent an invalid batch since the last call, with its error."""

    def send(self, run_id: str, message: ToOrchestrator) -> bool:
        """Sends to a run that has sent `Hello`; for any other run, only logs.

        Returns whether the run is connected, which does not mean that the message arrives. After `Evicted` or `Bye` a run
        has to send `Hello` again before any message of it is returned.
        """

    @property
    def rejected(self) -> int:
        """How many messages were refused so far."""

    def close(self) -> None:
        """Sends `Bye` to every run and frees everything. Safe to call twice."""
