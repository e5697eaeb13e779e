"""The interface of the wire, which the contract tests check.

The orchestrator's end is asynchronous and never blocks the loop; the trainer's end is synchronous, as a training loop is.
Delivery is at least once: `orchestrator.step.sender` resends after a `Ready`, and the trainer drops what it has already.
"""

from __future__ import annotations

from typing import Protocol

from counterpoint.transport.messages import Bye, Commit, Hello, Offer, ToOrchestrator
from counterpoint.transport.outages import Outage
from counterpoint.transport.records import Batch


class TrainerLink(Protocol):
    """The orchestrator's end of the wire."""

    async def start(self, hello: Hello) -> None:
        """Begins to connect; `receive` returns every `Ready`: the first, and one after each reconnect."""

    def durable_up_to(self, step: int) -> None:
        """Sets the step that the `Hello` of the next reconnect names as durable."""

    @property
    def outage(self) -> Outage | None:
        """Why the trainer is not there; None if it is."""

    async def send(self, message: Offer | Commit) -> None:
        """Passes a message to the link.

        A batch's arrays are sent by reference and must not change until it is acknowledged. A message of another session
        than that of the connection's newest `Ready` is dropped: its owner sends again what a later `Ready` lacks. Raises
        `ValueError` for a batch that cannot travel, `ConnectionError` after `close` or a failure of the link.
        """

    async def receive(self) -> ToOrchestrator:
        """Returns the next message from the trainer.

        Waits without limit; the caller sets the deadline. Raises `ConnectionError` after `close` or a failure of the link.
        """

    async def close(self) -> None:
        """Sends `Bye`, waits briefly for what is queued, frees everything. Safe to call twice."""


class BatchReceiver(Protocol):
    """The trainer's end of the wire."""

    def receive(self, timeout: float) -> tuple[str, Hello | Batch | Commit | Bye] | None:
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
