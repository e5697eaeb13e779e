"""Rank 0's side of the wire: who calls, what they are told, and which of their batches wait to be trained.

Nothing here trains or decides about places. A run with a place gets `READY`, which opens a session, and may send as many batches
as its credit. A run without one gets a message every few seconds that says what it waits for, or why it is sent away. A batch is
trained after the run has reported in the same session that its step is committed. Batches that are not committed when the session
ends are dropped, since they may never be committed. Each pass receives only for a moment, so that a flood of one peer's messages
does not delay the others' steps.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator

from trainer.config import TrainerConfig
from trainer.runs.control_files import run_directory
from trainer.runs.manager import MultiRunManager, Run
from trainer.runs.presence import Presence
from transport.messages import Acknowledged, Bye, Commit, Evicted, Hello, Ready, Rejected, Waiting
from transport.rate_limited_log import RateLimitedLog
from transport.records import Batch
from transport.wires.base import BatchReceiver

logger = logging.getLogger(__name__)

INTAKE_SECONDS = 0.1
"""Longest time that one pass takes messages in."""

WORD_SECONDS = 5.0
"""Between two words to a run that waits, and between two looks whether those that have a place can be reached."""

GRACE_SECONDS = 10.0
"""How long a run that calls may be without a configuration, as on a shared disk that takes its time."""

MAX_CALLERS = 1000
"""Runs without a place and without a directory that are let wait in that: beyond so many, names are being made up."""

MAX_REFUSALS = 8
"""Batches beyond its credit for which a run is only told off."""


class Sessions:
    """The runs that have a place are made known by `admit` and `dismiss`; the others are answered by `answer`."""

    def __init__(
        self, config: TrainerConfig, receiver: BatchReceiver, manager: MultiRunManager, presence: Presence
    ) -> None:
        self._config = config
        self._receiver = receiver
        self._manager = manager
        self._presence = presence
        self._runs: dict[str, Run] = {}
        self._training: dict[str, int] = {}
        """The step that a run's open step is: its batch waits no more, and has not been trained."""
        self._sessions: dict[str, int] = {}
        self._committed: dict[str, int] = {}
        """By run, the last step that it has said to be committed."""
        self._refusals: dict[str, int] = {}
        self._called: dict[str, float] = {}
        """Since when a run without a place waits for an answer."""
        self._words: dict[str, tuple[str, float]] = {}
        """What a run that waits was last told, and when."""
        self._looked = 0.0
        self._peer_log = RateLimitedLog(logger)
        self.calls = False
        """Whether somebody has called since the last `answer`."""

    def take_in(self, timeout: float) -> Iterator[tuple[Run, str]]:
        """Takes in what comes, waiting `timeout` seconds for the first message. Yields runs that send invalid data, and why."""
        received = self._receiver.receive(timeout)
        deadline = time.monotonic() + INTAKE_SECONDS
        while received is not None:
            run_id, message = received
            match message:
                case Hello():
                    self._on_hello(run_id)
                case Batch():
                    if (run := self._runs.get(run_id)) is None:
                        line = f"a batch of step {message.step} of run {run_id} came before its READY; dropped"
                        self._peer_log.note(logging.WARNING, line)
                    elif (offence := self._on_batch(run, message)) is not None:
                        yield run, offence
                case Commit(step):
                    if run_id in self._runs:
                        self._committed[run_id] = max(step, self._committed.get(run_id, 0))
                case Bye():
                    self._peer_log.note(logging.INFO, f"the orchestrator of run {run_id} left")
                    self._presence.left(run_id, time.monotonic())
                    self._forget_uncommitted(run_id)
                    self._forget_call(run_id)
                    self.calls = True
            received = self._receiver.receive(0.0) if time.monotonic() < deadline else None
        for run_id, reason in self._receiver.take_invalid_batches().items():
            if (run := self._runs.get(run_id)) is not None:
                yield run, reason

    # --- runs with a place ---

    def admit(self, run: Run) -> None:
        """From now on its batches are taken; its orchestrator, if it is there, is told so."""
        self._runs[run.run_id] = run
        self._forget_call(run.run_id)
        self._expect_farewell(run)
        if run.run_id in self._presence.present(time.monotonic()):
            self._welcome(run)

    def dismiss(self, run_id: str) -> None:
        """Nothing more is taken from it, and what waits is forgotten."""
        run = self._runs.pop(run_id, None)
        if run is not None:
            run.waiting.clear()
        for held in (self._training, self._sessions, self._committed, self._refusals):
            held.pop(run_id, None)

    def next_batch(self, run: Run) -> Batch | None:
        """The batch that the run is to be trained on next, if it is there and committed. It is acknowledged, as there is now room
        for another."""
        step = run.progress.step + 1
        if step > self._committed.get(run.run_id, 0):
            return None
        batch = run.waiting.pop(step, None)
        if batch is not None:
            self._training[run.run_id] = batch.step
            self._receiver.send(run.run_id, Acknowledged(batch.step, run.durable_step))
        return batch

    def trained(self, run: Run) -> None:
        """Its open step is over."""
        self._training.pop(run.run_id, None)
        self._expect_farewell(run)

    def durable(self, run: Run) -> None:
        """A checkpoint was written."""
        self._receiver.send(run.run_id, Acknowledged(run.progress.step, run.durable_step))

    def _on_hello(self, run_id: str) -> None:
        if (run := self._runs.get(run_id)) is not None and not self._is_deleted(run_id):
            self._presence.called(run_id)
            self._welcome(run)
        elif len(self._called) >= MAX_CALLERS and not run_directory(self._config.output_dir, run_id).is_dir():
            self.send_away(run_id, f"{len(self._called)} runs wait already, and it has no directory; let it try again")
        else:
            self._presence.called(run_id)
            self._called.setdefault(run_id, time.monotonic())
            self._words.pop(run_id, None)
            self.calls = True

    def _is_deleted(self, run_id: str) -> bool:
        """Whether the run that holds the place was deleted since the last discovery: the caller may be another run with the same
        id."""
        index = self._manager.index_of(run_id)
        return index is not None and self._manager.is_deleted(index)

    def _welcome(self, run: Run) -> None:
        self._forget_uncommitted(run.run_id)
        self._sessions[run.run_id] = session = secrets.randbits(62)
        config = self._config
        limits = (config.waiting_share, config.transport.largest_batch)
        self._receiver.send(run.run_id, Ready(run.progress.step + 1, config.transport.credit, session, *limits))
        if run.durable_step:
            self._receiver.send(run.run_id, Acknowledged(run.durable_step, run.durable_step))
        self._expect_farewell(run)

    def _forget_uncommitted(self, run_id: str) -> None:
        if (run := self._runs.get(run_id)) is not None:
            committed = self._committed.get(run_id, 0)
            run.waiting = {step: batch for step, batch in run.waiting.items() if step <= committed}

    def _expect_farewell(self, run: Run) -> None:
        if run.finished:
            self._presence.finished(run.run_id, time.monotonic() + run.config.trainer_timeout_seconds)
        else:
            self._presence.admitted(run.run_id)

    def _on_batch(self, run: Run, batch: Batch) -> str | None:
        """Keeps the batch, or drops it and says so; the reason where nothing more is to be taken from the run."""
        credit = self._config.transport.credit
        taken = self._training.get(run.run_id, run.progress.step)
        if batch.step <= taken:
            self._peer_log.note(logging.INFO, f"step {batch.step} of run {run.run_id} is here already; dropped")
            self._receiver.send(run.run_id, Acknowledged(batch.step, run.durable_step))
        elif batch.step > taken + credit:  # one that is being trained was acknowledged, which made room for another
            reason = f"step {batch.step}: this trainer trains step {taken + 1} next and holds {credit} batches"
            self._refusals[run.run_id] = refusals = self._refusals.get(run.run_id, 0) + 1
            if refusals > MAX_REFUSALS:
                return f"{reason}, as it was told {MAX_REFUSALS} times"
            logger.warning("run %s sends more than its credit: %s", run.run_id, reason)
            self._receiver.send(run.run_id, Rejected(batch.step, reason, self._sessions.get(run.run_id)))
        else:
            run.waiting[batch.step] = batch
            return self._too_much(run)
        return None

    def _too_much(self, run: Run) -> str | None:
        share = self._config.waiting_share
        held = sum(batch.nbytes for batch in run.waiting.values())
        if held <= share or len(run.waiting) == 1:
            return None
        return f"its {len(run.waiting)} waiting batches take {held} bytes; a run may use at most {share}, as the trainer told it"

    # --- runs without a place ---

    def answer(self) -> None:
        """Tells every run without a place how it stands since the last discovery; looks whether the others are still there."""
        self.calls = False
        now = time.monotonic()
        queue = {run_id: number for number, run_id in enumerate(self._manager.waiting, 1)}
        for run_id in sorted(self._presence.present(now) - self._runs.keys()):
            known = run_id in queue or self._manager.index_of(run_id) is not None
            if (reason := self._no(run_id, known, now)) is not None:
                self.send_away(run_id, reason)
            else:
                self._let_wait(run_id, self._why_not_yet(queue.get(run_id)), now)
        if self._manager.waiting and now - self._looked > WORD_SECONDS:
            self._looked = now
            for run in self._runs.values():
                if not self._receiver.send(run.run_id, Acknowledged(run.durable_step, run.durable_step)):
                    self._presence.unreachable(run.run_id, now, run.config.trainer_timeout_seconds)

    def send_away(self, run_id: str, reason: str) -> None:
        """Takes nothing more from a run, until it calls again."""
        self._peer_log.note(logging.ERROR, f"run {run_id} is sent away: {reason}")
        self._receiver.send(run_id, Evicted(reason))
        self._presence.sent_away(run_id)
        self._forget_call(run_id)
        self.dismiss(run_id)

    def _forget_call(self, run_id: str) -> None:
        self._called.pop(run_id, None)
        self._words.pop(run_id, None)

    def _no(self, run_id: str, known: bool, now: float) -> str | None:
        """Why there is nothing to wait for; None where there is."""
        if (reason := self._manager.refused.get(run_id)) is not None:
            return reason
        directory = run_directory(self._config.output_dir, run_id)
        if self._presence.ended(run_id) == "deleted" and not directory.exists():
            return f"its directory {directory} was deleted"
        if not known and now - self._called.setdefault(run_id, now) > GRACE_SECONDS:
            return (
                f"it has no {directory / 'control' / 'orch.toml'} that the trainer can read; do orchestrator and trainer have "
                "the same output_dir, and is the directory open to the trainer's user?"
            )
        return None

    def _why_not_yet(self, number: int | None) -> str:
        if number is None:
            return "its control/orch.toml is not there yet"
        return (
            f"all {self._config.max_runs} places (trainer.max_runs) are taken; it is number {number} of "
            f"{len(self._manager.waiting)} that wait"
        )

    def _let_wait(self, run_id: str, reason: str, now: float) -> None:
        told, when = self._words.get(run_id, ("", 0.0))
        if told == reason and now - when < WORD_SECONDS:
            return
        self._words[run_id] = (reason, now)
        if not self._receiver.send(run_id, Waiting(reason)):
            self._presence.sent_away(run_id)
            self._forget_call(run_id)
