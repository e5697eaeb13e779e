"""The interface of a wire: what `zmq` and `filesystem` both are. The contract tests run over each implementation.

The orchestrator's end is asynchronous and never blocks the loop; the trainer's end is synchronous, as a training loop is.
Delivery is at least once: resending after a `Ready` is the owner's business (`orchestrator.step.sender`), dropping what it has is
the trainer's.
"""

from __future__ import annotations

from typing import Protocol

from transport.messages import Bye, Commit, Hello, Offer, ToOrchestrator
from transport.records import Batch


class TrainerLink(Protocol):
    """The orchestrator's end of the wire."""

    async def start(self, hello: Hello) -> None:
        """Begins to connect; every `Ready` that follows (the first, and one after each reconnect) comes by `receive`."""

    def acknowledged(self, step: int) -> None:
        """Tells the link what to claim in the `Hello` of its next reconnect."""

    async def send(self, message: Offer | Commit) -> None:
        """Hands a message over.

        A batch's arrays are sent by reference and must not change until it is acknowledged. What does not belong to the
        session that the newest `Ready` of the present connection opened is dropped: its owner sends what a later `Ready`
        lacks. Raises `ValueError` for a batch that cannot travel, `ConnectionError` after `close` or a failure of the link.
        """

    async def receive(self) -> ToOrchestrator:
        """The next message from the trainer.

        Waits without limit; the caller owns the deadline. Raises `ConnectionError` after `close` or a failure of the link.
        """

    async def close(self) -> None:
        """Says `Bye`, waits briefly for what is queued, frees everything. Safe to call twice."""


class BatchReceiver(Protocol):
    """The trainer's end of the wire."""

    def receive(self, timeout: float) -> tuple[str, Hello | Batch | Commit | Bye] | None:
        """The next valid message with its run id, or None after `timeout` seconds.

        A bad one is counted, logged with its sender, answered with `Rejected`, and never returned. A batch or commit of
        another session than that of the last `Ready` sent to its run is dropped without an answer. So that a flood of them
        cannot keep the caller here, None may come early, too.
        """

    def take_invalid_batches(self) -> dict[str, str]:
        """The runs that have sent an invalid batch since the last call, and what was wrong with it."""

    def send(self, run_id: str, message: ToOrchestrator) -> bool:
        """Sends to a run that has said `Hello`; to any other it is a logged no-op.

        Whether it is connected, which does not mean that the message arrives. After `Evicted` or `Bye` a run has to say
        `Hello` again before anything of it is let through.
        """

    @property
    def rejected(self) -> int:
        """How many messages were refused so far."""

    def close(self) -> None:
        """Says `Bye` to every run and frees everything. Safe to call twice."""
