"""Rank 0's side of the wire: the sessions with the orchestrators, the answers to them, and the batches that wait to be trained.

A run in a slot gets `READY`, which opens a session, and may send as many batches as its credit. A run without a slot gets
`WAITING` every few seconds, with the reason, or `EVICTED`. A batch is trained after the orchestrator has reported in the same
session that its step is committed. Batches without a commit at the session's end are dropped, since it may never come. Each
pass receives only for a moment, so that a flood of one peer's messages does not delay the others' steps.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

from counterpoint.run.items import decode_item
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.metrics import MetricValue
from counterpoint.trainer.packer import InvalidBatch
from counterpoint.trainer.runs.control_files import run_directory
from counterpoint.trainer.runs.epochs import Epochs
from counterpoint.trainer.runs.manager import MultiRunManager
from counterpoint.trainer.runs.record import TAKES_BATCHES, RunRecord
from counterpoint.trainer.runs.run import Run
from counterpoint.trainer.work.contribution import StepOutcome
from counterpoint.trainer.work.order import Order
from counterpoint.trainer.work.sources import Item
from counterpoint.transport.codec import digest_of
from counterpoint.transport.messages import (
    SECONDS,
    Acknowledged,
    Answered,
    Ask,
    Bye,
    Commit,
    Evicted,
    Hello,
    Published,
    Ready,
    Rejected,
    Waiting,
)
from counterpoint.transport.outages import OutageKind, Outages
from counterpoint.transport.rate_limited_log import RateLimitedLog
from counterpoint.transport.records import Batch
from counterpoint.transport.wires.base import BatchReceiver

logger = logging.getLogger(__name__)

INTAKE_SECONDS = 0.1
"""Longest duration of one call of `receive`."""

ANSWER_SECONDS = 5.0
"""Time between two equal answers to a run that waits, and between two checks whether orchestrators are reachable."""

GRACE_SECONDS = 10.0
"""Seconds after which a run with an invisible directory gets advice. It waits on: the directory may be there all the same."""

MAX_CALLERS = 1000
"""Unanswered runs beyond which one without a directory has to come again later: such names are made up."""

MAX_REFUSALS = 8
"""Batches beyond its credit that a run may send before it is evicted."""


class Sessions:
    """Receives from all orchestrators and answers them. A run's state is in the run's record, and in its order."""

    def __init__(
        self,
        config: TrainerConfig,
        receiver: BatchReceiver,
        manager: MultiRunManager,
        orders: Mapping[int, Order[Item]],
    ) -> None:
        """Receives by `receiver` for the runs of `manager`. `orders`, by slot, are those of admitted runs."""
        self._config = config
        self._receiver = receiver
        self._manager = manager
        self._registry = manager.registry
        self._orders = orders
        self._epochs = Epochs(config.output_dir, manager)
        self._reached_out = 0.0
        self._peer_log = RateLimitedLog(logger)
        self.outages = Outages()
        """The absent orchestrators of runs in slots."""
        self.has_news = False
        """Whether a `HELLO` or `BYE` has come since the last `answer`."""

    def receive(self, timeout: float) -> Iterator[tuple[Run, str]]:
        """Receives messages for a moment, and waits `timeout` seconds for the first.

        Yields runs that send invalid data, and why.
        """
        received = self._receiver.receive(timeout)
        deadline = time.monotonic() + INTAKE_SECONDS
        while received is not None:
            run_id, message = received
            match message:
                case Hello():
                    self._on_hello(message)
                case Batch():
                    if (run := self._registry.taking(run_id)) is None:
                        line = f"a batch of step {message.step} of run {run_id} came before its READY; dropped"
                        self._peer_log.note(logging.WARNING, line)
                    else:
                        self._confirm(run_id)
                        if (reason := self._on_batch(run, message)) is not None:
                            yield run, reason
                case Ask():
                    if (run := self._registry.taking(run_id)) is not None:
                        self._confirm(run_id)
                        if (reason := self._on_ask(run, message)) is not None:
                            yield run, reason
                case Commit(step):
                    if (run := self._registry.taking(run_id)) is not None:
                        self._confirm(run_id)
                        self._orders[run.slot].commit(step)
                case Bye():
                    self._peer_log.note(logging.INFO, f"the orchestrator of run {run_id} left")
                    self._registry.disconnected(run_id, time.monotonic())
                    if (run := self._registry.taking(run_id)) is not None:
                        self._forget_uncommitted(run)
                    self.has_news = True
            received = self._receiver.receive(0.0) if time.monotonic() < deadline else None
        for run_id, reason in self._receiver.take_invalid_batches().items():
            if (run := self._registry.taking(run_id)) is not None:
                yield run, reason

    # --- runs in slots ---

    def admit(self, run: Run) -> None:
        """Takes the batches of a run from now on, and sends READY to its orchestrator, if that is present."""
        now = time.monotonic()
        self._registry.advance(run.slot, now)
        self._registry.answered(run.run_id)
        if run.run_id in self._registry.present(now):
            self._welcome(run)

    def taken(self, run: Run, step: int, batch: Batch) -> None:
        """Acknowledges a batch that goes into training, since there is now room for another."""
        run.wire.batch = digest_of(batch)
        self._receiver.send(run.run_id, Acknowledged(step, run.durable_step))

    def durable(self, run: Run) -> None:
        """Sends an acknowledgement after a checkpoint was written."""
        self._receiver.send(run.run_id, Acknowledged(run.progress.step, run.durable_step))

    def published(self, run: Run) -> None:
        """Reports that the weights of the run's newest step are published."""
        self._receiver.send(run.run_id, Published(run.progress.step))

    def _on_hello(self, hello: Hello) -> None:
        registry, run_id = self._registry, hello.run_id
        self.outages.end(_orchestrator_of(run_id))
        if (run := registry.taking(run_id)) is not None and not self._manager.is_deleted(run.slot):
            registry.connected(hello)
            self._welcome(run)
        elif registry.unanswered >= MAX_CALLERS and not run_directory(self._config.output_dir, run_id).is_dir():
            reason = f"{registry.unanswered} runs wait already, and this one has no directory; try again later"
            self._peer_log.note(logging.WARNING, f"run {run_id} is not waited for: {reason}")
            self._receiver.send(run_id, Bye(reason))  # no verdict: its directory may only not be seen from here
        else:  # if the run in the slot was deleted since the last discovery, this may be another with the same id
            registry.connected(hello)
            registry.await_answer(run_id, time.monotonic())
            self.has_news = True

    def _welcome(self, run: Run) -> None:
        self._forget_uncommitted(run)
        run.wire.session = session = secrets.randbits(62)
        config, (taken, batch) = self._config, self._newest_batch(run)
        limits = (config.waiting_share, config.transport.largest_batch)
        self._receiver.send(run.run_id, Ready(taken + 1, config.transport.credit, session, *limits, batch))
        if run.durable_step:
            self._receiver.send(run.run_id, Acknowledged(run.durable_step, run.durable_step))
        for answer in run.wire.answers.values():
            self._receiver.send(run.run_id, answer)
        self._registry.advance(run.slot, time.monotonic())

    def _forget_uncommitted(self, run: Run) -> None:
        """Forgets the uncommitted batches, which those of the next session replace.

        If another process has taken the run over, forgets all, also commits: that process sends those of its history.
        """
        order, record = self._orders[run.slot], self._registry.find(run.run_id)
        if run.config.driven:  # its items need no commit, and are sent again
            order.waiting.clear()
            return
        hello = record.orchestrator.hello if record is not None else None
        if hello is not None and hello.holder != run.wire.holder:
            run.wire.holder, order.committed = hello.holder, 0
        order.forget_uncommitted()

    def _on_batch(self, run: Run, batch: Batch) -> str | None:
        """Keeps the batch, or drops it and sends why. Returns a reason to evict the run, if there is one."""
        credit, order = self._config.transport.credit, self._orders[run.slot]
        taken, digest = self._newest_batch(run)
        if self._conflicts(run, batch, taken, digest):
            self.send_away(
                run.run_id,
                f"step {batch.step} of run {run.run_id} has another batch here: another orchestrator has sent it, and its "
                "history is what is trained",
            )
        elif batch.step <= taken:
            self._peer_log.note(logging.INFO, f"step {batch.step} of run {run.run_id} is here already; dropped")
            self._receiver.send(run.run_id, Acknowledged(batch.step, run.durable_step))
        elif batch.step > taken + credit:  # a batch in training was acknowledged, which made room for another
            reason = f"step {batch.step}: this trainer trains step {taken + 1} next and holds {credit} batches"
            run.wire.refusals += 1
            if run.wire.refusals > MAX_REFUSALS:
                return f"{reason}; it was rejected {MAX_REFUSALS} times before"
            logger.warning("run %s sends more than its credit: %s", run.run_id, reason)
            self._receiver.send(run.run_id, Rejected(batch.step, reason, run.wire.session))
        else:
            order.ask(batch.step, Item(batch))
            return self._too_much(order)
        return None

    # --- driven runs ---

    def _on_ask(self, run: Run, ask: Ask) -> str | None:
        """Has an item carried out, or answers it again. Returns a reason to evict the run, if there is one."""
        order, credit = self._orders[run.slot], self._config.transport.credit
        if not run.config.driven:
            return f"item {ask.number}: the run is not driven"
        if ask.number <= order.newest:
            if (answer := run.wire.answers.get(ask.number)) is not None:
                self._receiver.send(run.run_id, answer)
            return None
        if ask.number > order.newest + credit:
            return f"item {ask.number}: this trainer carries out item {order.newest + 1} next and holds {credit}"
        try:
            wanted = decode_item(ask.header)
        except ValueError as error:
            return f"item {ask.number}: {error}"
        item = Item(ask.batch, **{name: getattr(wanted, name) for name in wanted.__struct_fields__})
        item.answer.add_done_callback(lambda done: self._answer_item(run, ask.number, done))
        order.ask(ask.number, item)
        return self._too_much(order)

    def _answer_item(self, run: Run, number: int, done: Future[Any]) -> None:
        """Sends the result of an item, and keeps it for a session to come."""
        if done.cancelled():
            return
        answer = run.wire.answers[number] = _answered(number, run.progress.step, done, {SECONDS: run.wire.spent})
        for old in sorted(run.wire.answers)[: -self._config.transport.credit - 1]:
            del run.wire.answers[old]
        self._receiver.send(run.run_id, answer)

    def _conflicts(self, run: Run, batch: Batch, taken: int, digest: str) -> bool:
        """Returns whether the step has another batch, trained or committed by this process, so that this is no repetition."""
        if batch.step == taken and digest:
            return digest_of(batch) != digest
        order = self._orders[run.slot]
        known = order.waiting.get(batch.step) if batch.step <= order.committed else None
        return known is not None and known.batch is not None and digest_of(known.batch) != digest_of(batch)

    def _newest_batch(self, run: Run) -> tuple[int, str]:
        """Returns the last step with a batch in training, and its digest. The weights may be of the step before."""
        newest = self._orders[run.slot].newest
        return newest, run.progress.batch if newest == run.progress.step else run.wire.batch

    def _confirm(self, run_id: str) -> None:
        """Notes, once a `HELLO`, that its process has sent something in its session."""
        record = self._registry.find(run_id)
        if record is not None and record.orchestrator.hello is not None and not record.orchestrator.confirmed:
            if record.orchestrator.hello.epoch:
                self._epochs.confirm(record.orchestrator.hello)
            record.orchestrator.confirmed = True

    def _too_much(self, order: Order[Item]) -> str | None:
        share = self._config.waiting_share
        held = sum(item.batch.nbytes for item in order.waiting.values() if item.batch is not None)
        if held <= share or len(order.waiting) == 1:
            return None
        return f"its {len(order.waiting)} waiting batches take {held} bytes; a run may use at most {share}, which READY states"

    def forget(self, run_id: str) -> None:
        """Ends the outage of a run's orchestrator: the run leaves its slot."""
        self.outages.end(_orchestrator_of(run_id))

    # --- runs without a slot ---

    def answer(self) -> None:
        """Answers every orchestrator of a run without a slot, as of the last discovery.

        It also checks whether the orchestrators of the runs in slots can be reached.
        """
        self.has_news = False
        registry, now = self._registry, time.monotonic()
        queue = {run_id: number for number, run_id in enumerate(registry.queue, 1)}
        for run_id in sorted(registry.present(now)):
            if registry.taking(run_id) is not None:
                continue
            record = registry.find(run_id)
            assert record is not None
            if record.reason is not None:
                self.send_away(run_id, record.reason)
            else:
                self._let_wait(run_id, self._why_not_yet(record, queue.get(run_id), now), now)
        self.outages.remind()
        if now - self._reached_out > ANSWER_SECONDS:
            self._reached_out = now
            for run in registry.at(*TAKES_BATCHES):
                self._reach(run, now)

    def _reach(self, run: Run, now: float) -> None:
        """Notes whether the orchestrator of a run in a slot is reachable. Another run gets its place only while runs wait."""
        who = _orchestrator_of(run.run_id)
        record = self._registry.find(run.run_id)
        if record is None or record.orchestrator.hello is None:
            return  # its items come from elsewhere
        has_left = not record.orchestrator.connected
        if not self._registry.queue and (has_left or self.outages.of(who) is not None):
            reached = False
        else:
            reached = self._receiver.send(run.run_id, Acknowledged(run.durable_step, run.durable_step))
        if not reached and self._registry.queue:
            self._registry.unreachable(run.run_id, now, run.config.trainer_timeout_seconds)
        if not (reached or run.finished or self.outages.of(who) is not None):  # an outage ends with a `HELLO`
            what, reason = (
                ("has left", "it ended in order") if has_left else ("is not connected", "it was killed or cut off")
            )
            self.outages.begin(OutageKind.ORCHESTRATOR, who, what, reason, level=logging.WARNING)

    def deleted(self, run: Run) -> None:
        """Sends away a run with a deleted directory, unless its newest `HELLO` is another's, who may have made it anew."""
        record, directory = self._registry.find(run.run_id), run_directory(self._config.output_dir, run.run_id)
        hello = record.orchestrator.hello if record is not None and record.orchestrator.connected else None
        if hello is not None and hello.holder == run.wire.holder and not directory.exists():
            self.send_away(run.run_id, f"its directory {directory} was deleted")

    def send_away(self, run_id: str, reason: str) -> None:
        """Sends EVICTED. The orchestrator counts as absent until its next `HELLO`."""
        self._peer_log.note(logging.ERROR, f"run {run_id} is sent away: {reason}")
        self._receiver.send(run_id, Evicted(reason))
        self._registry.sent_away(run_id)

    def _why_not_yet(self, record: RunRecord, number: int | None, now: float) -> str:
        if number is None and record.found is not None:
            return "it is about to be admitted"
        if number is None:
            reason, path = (
                "its control/orch.toml is not there yet",
                run_directory(self._config.output_dir, record.run_id),
            )
            if now - self._registry.await_answer(record.run_id, now) <= GRACE_SECONDS:
                return reason
            return (
                f"{reason}: the trainer cannot read {path / 'control' / 'orch.toml'}. On a network file system it may see that "
                "after a minute. Do orchestrator and trainer have the same output_dir, is it mounted at both, and is the "
                "directory open to the trainer's user?"
            )
        return (
            f"all {self._config.max_runs} slots (trainer.max_runs) are taken; it is number {number} of "
            f"{len(self._registry.queue)} that wait"
        )

    def _let_wait(self, run_id: str, reason: str, now: float) -> None:
        if self._registry.repeats(run_id, reason, now, ANSWER_SECONDS):
            return
        if not self._receiver.send(run_id, Waiting(reason)):
            self._registry.sent_away(run_id)


def _answered(number: int, step: int, done: Future[Any], spent: Mapping[str, float]) -> Answered:
    if (error := done.exception()) is not None:
        fault: Literal["asker", "trainer"] = "asker" if isinstance(error, ValueError | InvalidBatch) else "trainer"
        return Answered(number, step, fault, str(error) or type(error).__name__)
    match done.result():
        case StepOutcome(metrics, columns):
            return Answered(number, step, metrics={**_numbers(metrics), **spent}, columns=columns)
        case Path() as directory:
            return Answered(number, step, text=str(directory), metrics=spent)
        case dict() as metrics:
            return Answered(number, step, metrics={**_numbers(metrics), **spent})
    return Answered(number, step, metrics=spent)


def _numbers(metrics: Mapping[str, MetricValue]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


def _orchestrator_of(run_id: str) -> str:
    return f"the orchestrator of run {run_id}"
