"""Decides what to send to the trainer, and tracks which batches it has: a pure state machine that `sender.py` executes.

Sessions: every READY of the trainer opens a session and numbers it, on a new connection or not. Every message names its
session, and the link, the trainer and this file drop messages of another session. So a batch that was in transit while the
trainer restarted neither exceeds the credit nor causes an eviction.

Offered and committed: a batch is offered before its step is committed, so that it travels while the disk is awaited. The
trainer trains it once a COMMIT of the same session covers its step. At a session's end it drops batches that no COMMIT covers.
For example, after a kill between offer and commit of step 7 the trainer drops batch 7.

Next in the reading order of `docs/architecture.md`: `orchestrator/step/sender.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from counterpoint.transport.messages import Acknowledged, Bye, Evicted, Ready, Rejected, ToOrchestrator, Waiting


class EvictedError(RuntimeError):
    """The trainer accepts nothing more from this run. The message is its reason."""


class RejectedError(RuntimeError):
    """The trainer refused a message: both ends disagree about a valid batch, which no retry mends."""


class MissingBatchError(RuntimeError):
    """The trainer requested a step without a batch: it is gone or never existed."""


@dataclass(frozen=True, slots=True)
class SendBatch:
    """Due: send the batch of `step`."""

    step: int
    session: int


@dataclass(frozen=True, slots=True)
class SendCommit:
    """Due: announce that the steps up to `step` are committed."""

    step: int
    session: int


Due = SendBatch | SendCommit


class ConflictError(RuntimeError):
    """The trainer has another history of the run than this process, which no retry mends."""


class Delivery:
    """The state of delivery. `newest_step` is the last committed step, 0 for none."""

    def __init__(self, run_id: str, newest_step: int) -> None:
        self._run_id = run_id
        self.sizes: dict[int, int] = {}
        """Bytes of the batches by step. The caller adds those on disk."""
        self.newest_step = newest_step
        """The last committed step."""
        self._offered = newest_step
        """The last step that was offered."""
        self.session: Ready | None = None
        """The READY that opened the present session, or None while the trainer is disconnected or makes the run wait."""
        self._sent = 0
        """The last step that was sent in this session, or that the trainer had at its beginning."""
        self.acknowledged = 0
        """The last step that the trainer has, by its newest message, and it has earlier ones, too. 0 until its first READY."""
        self._ever_sent = newest_step
        """The last step that this process has sent. Another process may have sent earlier ones."""
        self._announced: int | None = None
        """The last step with a commit announced in this session, or None before the first announcement, which is always sent:
        from it on the trainer hears no older process of this run."""

    @property
    def gone(self) -> int:
        """The last committed step without a batch: a trainer reported it durable before any message of this one."""
        return next((step for step in range(self.newest_step, 0, -1) if step not in self.sizes), 0)

    # --- events ---

    def receive(self, message: ToOrchestrator) -> None:
        """Handles a message of the trainer. Raises `EvictedError`, `RejectedError`, `ConflictError`."""
        match message:
            case Ready():
                self._begin_session(message)
            case Waiting() | Bye():
                self.session = None
            case Acknowledged(step):
                # It trains step by step, so this covers earlier steps, whose messages may be lost.
                self.acknowledged = max(self.acknowledged, min(step, self.newest_step))
                self._sent = max(self._sent, self.acknowledged)
            case Rejected(step, reason, session):
                if session is None or (self.session is not None and session == self.session.session):
                    what = f"the batch of step {step}" if step is not None else "a message of this run"
                    raise RejectedError(f"the trainer rejected {what}: {reason}")
            case Evicted(reason):
                raise EvictedError(f"the trainer evicted run {self._run_id!r}: {reason}")

    def offer(self, step: int, nbytes: int) -> None:
        """Adds the batch of the next step, which is not committed yet."""
        assert step == self._offered + 1 == self.newest_step + 1
        self.sizes[step] = nbytes
        self._offered = step

    def commit(self, step: int) -> None:
        """Marks the offered step as committed."""
        assert step == self._offered == self.newest_step + 1
        self.newest_step = step

    def forget_up_to(self, step: int) -> None:
        """Forgets the sizes of batches that are never sent again, since a checkpoint of the trainer covers them."""
        for old in [each for each in self.sizes if each <= step]:
            del self.sizes[old]

    def check_history(self, ready: Ready) -> None:
        """Raises `ConflictError` if the trainer has more steps than this process has committed and sent."""
        if ready.next_step > self.newest_step + 1:
            raise ConflictError(
                f"the trainer has trained up to step {ready.next_step - 1}, but this run's newest committed step is "
                f"{self.newest_step}: its checkpoints are newer than this run's, or another orchestrator has continued the run. "
                "Resume it from the newest of its directories"
            )
        if ready.next_step > self._ever_sent + 1:
            raise ConflictError(
                f"the trainer has trained up to step {ready.next_step - 1}, but this process has sent batches up to step "
                f"{self._ever_sent} only: another orchestrator has continued the run, and this directory is not the newest of it"
            )

    def _begin_session(self, ready: Ready) -> None:
        self.check_history(ready)
        self.session = ready
        self._sent = self.acknowledged = ready.next_step - 1
        self._announced = None

    # --- due messages ---

    def next(self) -> Due | None:
        """Returns the next message to send, and counts it as sent, or None when nothing is due."""
        if self.session is None:
            return None
        if self._announced is None or self._announced < self.newest_step:
            self._announced = self.newest_step
            return SendCommit(self.newest_step, self.session.session)
        if self._sent < self._offered and self._has_credit(self.session):
            self._sent += 1
            self._ever_sent = max(self._ever_sent, self._sent)
            return SendBatch(self._sent, self.session.session)
        return None

    def _has_credit(self, session: Ready) -> bool:
        unacknowledged = range(self.acknowledged + 1, self._sent + 1)
        held = sum(self.sizes.get(step, 0) for step in [*unacknowledged, self._sent + 1])
        return not unacknowledged or (len(unacknowledged) < session.credit and held <= session.credit_bytes)

    def is_due(self, due: Due) -> bool:
        """Whether `due` is still due: the session is the same, and the trainer does not have the batch by now."""
        if self.session is None or due.session != self.session.session:
            return False
        return isinstance(due, SendCommit) or due.step > self.acknowledged
