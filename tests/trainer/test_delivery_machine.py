"""Each committed batch is trained once and no other is, whatever is lost, late or killed between orchestrators and trainer.

A random walk over both ends' own logic: `orchestrator.step.delivery` and `transport.wires.conversations` at one,
`transport.wires.receiver` and `trainer.work.sessions` at the other. The machine plays what lies between: the link's queue,
connections that break and still deliver what was on its way, acknowledgements that are lost, the disk of either side, and the
ends of both processes. Of several runs by one connection, what befalls one of them is nothing to the others.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from counterpoint.orchestrator.step.delivery import Delivery, EvictedError, RejectedError, SendBatch
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.runs.manager import MultiRunManager
from counterpoint.trainer.runs.run import Run
from counterpoint.trainer.work.order import Order
from counterpoint.trainer.work.sessions import Sessions
from counterpoint.trainer.work.sources import Item
from counterpoint.transport import codec
from counterpoint.transport.files.atomic import Buffer
from counterpoint.transport.messages import Acknowledged, Commit, Hello, Offer, ToOrchestrator
from counterpoint.transport.outages import Outages
from counterpoint.transport.records import Batch, SampleInfo
from counterpoint.transport.wires.conversations import Conversation, Conversations
from counterpoint.transport.wires.receiver import Receiver
from counterpoint.transport.wires.zmq_wire import Arrival, ZmqListener
from tests.trainer.conftest import end_step, make_run_config, new_order, occupy_slot

STEPS = 9
CREDIT = 3


def make_batch(run_id: str, step: int, life: int) -> Batch:
    """One of the batches that a step may have: what is generated again is generated anew."""
    tokens = 1 + (step * life) % 5
    return Batch(
        run_id=run_id,
        step=step,
        samples=(SampleInfo(f"life-{life}", "toy", 0, 1.0, 1.0),),
        columns={
            "token_ids_T": np.zeros(tokens, np.int32),
            "loss_mask_T": np.ones(tokens, np.uint8),
            "log_probabilities_T": np.zeros(tokens, np.float32),
            "advantages_T": np.zeros(tokens, np.float32),
            "sample_offsets": np.array([0, tokens], np.int64),
        },
    )


def name_of(batch: Batch) -> str:
    return batch.samples[0].rollout_id


@dataclass
class Wire:
    """One connection. What was written before it broke may still arrive."""

    name: bytes
    alive: bool = True
    to_trainer: deque[list[Buffer]] = field(default_factory=deque)
    to_orchestrator: deque[list[Buffer]] = field(default_factory=deque)


class Socket(ZmqListener):
    """The trainer's, over the wires."""

    def __init__(self, wires: list[Wire]) -> None:
        self.wires = wires
        self.arrived: deque[Arrival] = deque()

    def poll(self, timeout: float) -> Arrival | None:
        return self.arrived.popleft() if self.arrived else None

    def write(self, sender: bytes, frames: Sequence[Buffer]) -> bool:
        for wire in self.wires:
            if wire.name == sender and wire.alive:
                wire.to_orchestrator.append(list(frames))
                return True
        return False

    def close(self, linger: float) -> None:
        """There is nothing to free."""


class Orchestrated:
    """A run at its orchestrator's end: the disk, and what the process has in memory. Unlike the link's, the queue is its own."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.committed: dict[int, Batch] = {}
        """All that ever were."""
        self.records: dict[int, Batch] = {}
        """Those on the disk, until they are durable."""
        self.checkpoint = 0
        """The trainer's newest on its disk, whether it has noticed by now or not."""
        self.writing: int | None = None
        """The step of the one that its thread writes."""
        self.trained: dict[int, str] = {}
        self.evicted = False
        self.has_sent_nonsense = False
        self.has_ended = False
        """Whether it has heard of its eviction."""
        self.lives = 0
        self.start()

    def start(self) -> None:
        self.lives += 1
        self.delivery = Delivery(self.run_id, max(self.committed, default=0))
        self.delivery.sizes |= {step: batch.nbytes for step, batch in self.records.items()}
        self.held: dict[int, Batch] = {}
        self.offered: Batch | None = None
        self.outbox: deque[Offer | Commit] = deque()
        self.inbox: deque[ToOrchestrator] = deque()
        self.conversation = Conversation(Hello(self.run_id, 0), self.inbox.append)

    def offer(self) -> None:
        if can_offer(self):
            self.offered = make_batch(self.run_id, self.delivery.newest_step + 1, self.lives)
            self.held[self.offered.step] = self.offered
            self.delivery.offer(self.offered.step, self.offered.nbytes)

    def commit(self) -> None:
        if self.offered is not None:
            self.committed[self.offered.step] = self.records[self.offered.step] = self.offered
            self.delivery.commit(self.offered.step)
            self.offered = None

    def hand_over(self) -> bool:
        due = self.delivery.next()
        if due is None:
            return False
        if isinstance(due, SendBatch):
            batch = self.held.get(due.step) or self.records.get(due.step)
            if batch is None:
                assert not self.delivery.is_due(due), f"step {due.step} is asked for, and is gone"
                return True
            self.outbox.append(Offer(batch, due.session))
        else:
            self.outbox.append(Commit(due.step, due.session))
        return True

    def hear(self) -> None:
        message = self.inbox.popleft()
        try:
            self.delivery.receive(message)  # raises at the first REJECTED that concerns us
        except EvictedError:
            assert self.evicted
            self.has_ended = True
        except RejectedError:
            assert self.has_sent_nonsense
        if isinstance(message, Acknowledged):
            self.records = {step: batch for step, batch in self.records.items() if step > message.durable}
        self.held = {step: batch for step, batch in self.held.items() if step > self.delivery.acknowledged}


which = st.integers(0, 2)
"""Of the runs that a rule may be about."""


def can_offer(each: Orchestrated) -> bool:
    return each.offered is None and each.delivery.newest_step < STEPS


def can_commit(each: Orchestrated) -> bool:
    return each.offered is not None


def can_write(each: Orchestrated) -> bool:
    return bool(each.outbox)


def can_hear(each: Orchestrated) -> bool:
    return bool(each.inbox) and not each.has_ended


def is_writing(each: Orchestrated) -> bool:
    return each.writing is not None


def any_of(can: Callable[[Orchestrated], bool]) -> Any:
    """There is such a run."""
    return precondition(lambda self: any(map(can, self.all)))


class DeliveryMachine(RuleBasedStateMachine):
    """Random work and random harm."""

    directory: Path
    """The job's, in which nothing is written."""
    count = 1
    """How many runs share the connection."""

    def __init__(self) -> None:
        super().__init__()
        self.wires: list[Wire] = []
        self.all = [Orchestrated(run_id) for run_id in ("one", "two", "three")[: self.count]]
        self.begin()
        self.start_trainer()

    @property
    def going(self) -> list[Orchestrated]:
        """Those that are not evicted: the first one is there for ever."""
        return [each for each in self.all if not each.evicted]

    def one(self, which: int, can: Callable[[Orchestrated], bool] | None = None) -> Orchestrated:
        found = list(filter(can, self.all)) if can is not None else self.going
        return found[which % len(found)]

    # --- the orchestrators: senders and link ---

    def start_orchestrators(self) -> None:
        for each in self.all:
            if not each.has_ended:
                each.start()
        self.begin()

    def begin(self) -> None:
        """Opens the connection of a process."""
        self.conversations: Conversations | None = None
        self.connect()

    def connect(self) -> None:
        for wire in self.wires:
            wire.alive = False
            wire.to_orchestrator.clear()
        self.lost_a_word = False
        self.wire = Wire(f"wire-{len(self.wires)}".encode())
        self.wires.append(self.wire)
        if self.conversations is None:
            stands_in: Any = self
            self.conversations = Conversations(stands_in, Outages())
            for each in self.all:
                if not each.has_ended:
                    self.conversations.join(each.conversation)
        else:
            self.conversations.lose("it broke", 0.0)
        self.conversations.begin()

    peer = "the trainer"

    def write(self, frames: Sequence[Buffer]) -> None:
        """As the connection of the link."""
        self.wire.to_trainer.append(list(frames))

    @any_of(can_offer)
    @rule(which=which)
    def offer(self, which: int) -> None:
        self.one(which, can_offer).offer()

    @any_of(can_commit)
    @rule(which=which)
    def commit(self, which: int) -> None:
        self.one(which, can_commit).commit()

    @rule(which=which)
    def sender_goes_on(self, which: int) -> None:
        self.one(which).hand_over()

    @any_of(can_write)
    @rule(which=which)
    def link_writes(self, which: int) -> None:
        self.say(self.one(which, can_write))

    def say(self, each: Orchestrated) -> bool:
        if not each.outbox:
            return False
        assert self.conversations is not None
        self.conversations.say(each.conversation, each.outbox.popleft())
        return True

    @precondition(lambda self: self.wire.to_orchestrator)
    @rule()
    def link_reads(self) -> None:
        self.read()

    def read(self) -> bool:
        if not self.wire.to_orchestrator:
            return False
        assert self.conversations is not None
        for each in self.all:
            each.conversation.displaced = 0  # nobody gives up here
        self.conversations.hear(self.wire.to_orchestrator.popleft())
        return True

    @any_of(can_hear)
    @rule(which=which)
    def sender_hears(self, which: int) -> None:
        self.hear(self.one(which, can_hear))

    def hear(self, each: Orchestrated) -> bool:
        if not can_hear(each):
            return False
        each.hear()
        if each.has_ended:
            assert self.conversations is not None
            self.conversations.leave(each.conversation)
        return True

    # --- the trainer ---

    def start_trainer(self) -> None:
        self.socket = Socket(self.wires)
        config = TrainerConfig.model_validate(
            {
                "output_dir": self.directory,
                "model": "/model",
                "max_runs": self.count,
                "max_waiting_bytes": 120 * self.count,
                "transport": {"credit": CREDIT},
            }
        )
        manager = MultiRunManager(self.directory, self.count)
        self.registry = manager.registry
        self.orders: dict[int, Order[Item]] = {}
        self.sessions = Sessions(config, Receiver(self.socket, 2**20), manager, self.orders)
        self.begun: dict[int, Batch] = {}
        """By slot, what the trainer computes."""
        for each in self.going:
            self.admit(each)

    def admit(self, each: Orchestrated) -> None:
        config = make_run_config(self.directory, self.directory, steps=100).model_copy(update={"run_id": each.run_id})
        run = occupy_slot(self.registry, config, each.checkpoint)
        self.orders[run.slot] = new_order(each.checkpoint)
        each.trained = {step: name_of(batch) for step, batch in each.committed.items() if step <= each.checkpoint}
        self.sessions.admit(run)

    def run_of(self, each: Orchestrated) -> Run:
        run = self.registry.taking(each.run_id)
        assert run is not None
        return run

    @rule(which=st.integers(0, 9))
    def trainer_receives(self, which: int) -> None:
        self.receive(which)

    @rule(which=which)
    def trainer_begins_before_the_commit(self, which: int) -> None:
        run = self.run_of(self.one(which))
        if not self.orders[run.slot].has_next:
            self.take(run)

    @rule(which=which)
    def trainer_trains(self, which: int) -> None:
        self.train(self.one(which))

    def receive(self, which: int) -> bool:
        talking = [wire for wire in self.wires if wire.to_trainer]
        if not talking:
            return False
        wire = talking[which % len(talking)]
        self.socket.arrived.append(Arrival(wire.name, "here", wire.to_trainer.popleft()))
        for run, _ in self.sessions.receive(0.0):
            (each,) = (each for each in self.all if each.run_id == run.run_id)
            assert each.has_sent_nonsense, "the run is evicted"
            self.evict(each)
        for each in self.all:
            if each.evicted and self.sessions.has_news:
                self.sessions.send_away(each.run_id, "it was evicted")
        self.sessions.has_news = False
        return True

    def evict(self, each: Orchestrated) -> None:
        run, each.evicted, reason = self.run_of(each), True, "it sends nonsense"
        self.begun.pop(run.slot, None)
        del self.orders[run.slot]
        self.registry.refuse(each.run_id, reason)
        self.registry.vacate(run.slot)
        self.sessions.send_away(each.run_id, reason)

    def take(self, run: Run) -> Batch | None:
        """Does what is due; returns the batch that counts, if one does."""
        due = self.orders[run.slot].next(0.0)
        if due.drops:
            del self.begun[run.slot]
        if due.item is None:
            return None
        batch = due.item.batch
        assert batch is not None
        assert (self.begun.get(run.slot) is batch) == due.has_begun, "trained what was not committed"
        self.begun[run.slot] = batch
        if not due.counts:
            return None
        self.sessions.taken(run, self.orders[run.slot].newest, batch)
        return batch

    def train(self, each: Orchestrated) -> bool:
        run = self.run_of(each)
        batch = self.take(run) if self.orders[run.slot].has_next else None
        if batch is None:
            return False
        assert batch.run_id == each.run_id
        assert batch.step == run.progress.step + 1
        assert batch.step in each.committed, "trained before it was committed"
        assert name_of(batch) == name_of(each.committed[batch.step]), "trained what was never committed"
        del self.begun[run.slot]
        end_step(run, self.orders[run.slot])
        each.trained[batch.step] = name_of(batch)
        self.registry.advance(run.slot, 0.0)
        return True

    @rule(which=which)
    def begin_a_checkpoint(self, which: int) -> None:
        each = self.one(which)
        if each.writing is None and each.checkpoint == self.run_of(each).durable_step:
            each.writing = self.run_of(each).progress.step

    @any_of(is_writing)
    @rule(which=which)
    def publish_the_checkpoint(self, which: int) -> None:
        self.publish(self.one(which, is_writing))

    def publish(self, each: Orchestrated) -> None:
        if each.writing is not None:
            each.checkpoint, each.writing = each.writing, None

    @rule(which=which)
    def notice_the_checkpoint(self, which: int) -> None:
        each = self.one(which)
        run = self.run_of(each)
        if each.checkpoint > run.durable_step:
            run.durable_step = each.checkpoint
            self.sessions.durable(run)

    @rule(moves=st.integers(1, 25), trained=st.booleans())
    def all_goes_well(self, moves: int, trained: bool) -> None:
        """For a while, with or without the trainer's own work."""
        for _ in range(moves):
            for each in self.going:
                if each.offered is not None:
                    each.commit()
                else:
                    each.offer()
            if not self.move(trained):
                return

    # --- harm ---

    @rule(kept=st.integers(0, 3))
    def break_the_connection(self, kept: int) -> None:
        while len(self.wire.to_trainer) > kept:
            self.wire.to_trainer.pop()
        self.connect()

    @precondition(lambda self: self.wire.to_orchestrator)
    @rule()
    def lose_an_acknowledgement(self) -> None:
        if isinstance(codec.decode_message(self.wire.to_orchestrator[0]), Acknowledged):
            self.wire.to_orchestrator.popleft()
            self.lost_a_word = True

    @precondition(lambda self: len(self.going) > 1)
    @rule()
    def send_nonsense(self) -> None:
        """The last run does, and is evicted if it is heard; the others go on."""
        each = self.going[-1]
        if each.conversation.session is not None:
            each.has_sent_nonsense = True
            offer = Offer(make_batch(each.run_id, 1, 1), each.conversation.session)
            self.write([*codec.encode_offer(offer)[:-1], b"nonsense"])

    @rule()
    def kill_the_orchestrators(self) -> None:
        self.start_orchestrators()

    @rule()
    def drain_the_orchestrators(self) -> None:
        assert self.conversations is not None
        for each in self.all:
            while self.say(each):
                pass
            if not each.has_ended:
                self.conversations.leave(each.conversation)
        self.start_orchestrators()

    @rule(which=which)
    def restart_one_run(self, which: int) -> None:
        """Its link is closed, and another by the same connection begins where it ended."""
        assert self.conversations is not None
        each = self.one(which)
        self.conversations.leave(each.conversation)
        each.start()
        self.conversations.join(each.conversation)

    @rule()
    def kill_the_trainer(self) -> None:
        for wire in self.wires:
            wire.to_trainer.clear()
        for each in self.all:
            each.writing = None  # what is half written is nothing
        self.connect()
        self.start_trainer()

    @rule(which=which)
    def lose_the_slot_and_get_it_back(self, which: int) -> None:
        """As when the run's configuration has changed: a new READY on the old connection. What is being written is waited for."""
        each = self.one(which)
        self.publish(each)
        slot = self.run_of(each).slot
        self.begun.pop(slot, None)
        self.registry.vacate(slot)
        self.admit(each)

    # --- what must hold ---

    @invariant()
    def no_more_is_held_than_there_is_credit_for(self) -> None:
        assert all(len(order.waiting) <= CREDIT for order in self.orders.values())

    @invariant()
    def what_a_kill_would_make_the_trainer_ask_for_is_on_disk(self) -> None:
        for each in self.going:
            assert set(range(each.checkpoint + 1, max(each.committed, default=0) + 1)) <= each.records.keys()

    def teardown(self) -> None:
        """Left alone, they come to rest with everything trained, acknowledged and forgotten."""
        assert self.conversations is not None
        if self.lost_a_word:
            self.connect()
        self.settle()
        for each in self.going:
            session = each.conversation.session
            if session is not None and each.delivery.acknowledged < each.delivery.newest_step:
                # A greeting of an old connection was read last, and has its place. It finds out with the next word that it says.
                self.conversations.say(each.conversation, Commit(each.delivery.newest_step, session))
        self.settle()
        for each in self.going:
            assert each.trained == {step: name_of(batch) for step, batch in each.committed.items()}
            assert each.delivery.acknowledged == each.delivery.newest_step
            assert set(each.held) <= {each.delivery.newest_step + 1}
        assert all(each.has_ended for each in self.all if each.evicted)

    def settle(self) -> None:
        assert any(not self.move() for _ in range(5000)), "they never come to rest"

    def move(self, trained: bool = True) -> bool:
        """Does one of the things that may happen next; False when there is none."""
        if any(self.say(each) for each in self.all) or self.read() or any(self.hear(each) for each in self.all):
            return True
        if any(each.hand_over() for each in self.going) or self.receive(-1):
            return True
        return trained and any(self.train(each) for each in self.going)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_every_committed_batch_is_trained_once_and_no_other(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    caplog.set_level(logging.CRITICAL)  # thousands of refusals, which are as they should be
    monkeypatch.setattr(DeliveryMachine, "directory", tmp_path, raising=False)
    monkeypatch.setattr(DeliveryMachine, "count", count)
    run_state_machine_as_test(DeliveryMachine, settings=settings(max_examples=200, stateful_step_count=60))
