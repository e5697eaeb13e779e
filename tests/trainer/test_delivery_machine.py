"""Each committed batch is trained once and no other is, whatever is lost, late or killed between orchestrator and trainer.

A random walk over both ends' own logic: `orchestrator.step.delivery` at one, `transport.wires.receiver` and
`trainer.runs.sessions` at the other. The machine plays what lies between: the link's queue, connections that break and still
deliver what was on its way, acknowledgements that are lost, the disk of either side, and the ends of both processes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from counterpoint.orchestrator.step.delivery import Delivery, SendBatch
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.early_steps import EarlySteps
from counterpoint.trainer.fair_share import FairShare
from counterpoint.trainer.runs.manager import MultiRunManager
from counterpoint.trainer.runs.run import Run
from counterpoint.trainer.runs.sessions import Sessions
from counterpoint.transport import codec
from counterpoint.transport.files.atomic import Buffer
from counterpoint.transport.messages import Acknowledged, Bye, Commit, Hello, Offer, Ready, Rejected, ToOrchestrator
from counterpoint.transport.records import Batch, SampleInfo
from counterpoint.transport.wires.receiver import Arrival, Receiver
from tests.trainer.conftest import make_run_config, occupy_slot

STEPS = 9
CREDIT = 3


def make_batch(step: int, life: int) -> Batch:
    """One of the batches that a step may have: what is generated again is generated anew."""
    tokens = 1 + (step * life) % 5
    return Batch(
        run_id="default",
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


class Socket:
    """`receiver.Listener` over the wires."""

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


class Computing:
    """What `EarlySteps` uses of the learner and of the requests, computing nothing."""

    def __init__(self) -> None:
        self.open: dict[int, Batch] = {}

    def open_step(self, slot: int, batch: Batch) -> SimpleNamespace:
        assert slot not in self.open
        self.open[slot] = batch
        return SimpleNamespace(samples=[])

    def drop_step(self, slot: int) -> None:
        del self.open[slot]

    def copy_at(self, run: Run, step: int) -> None:
        """There is none."""


class DeliveryMachine(RuleBasedStateMachine):
    """Random work and random harm."""

    directory: Path
    """The job's, in which nothing is written."""

    def __init__(self) -> None:
        super().__init__()
        self.wires: list[Wire] = []
        self.lives = 0
        self.committed: dict[int, Batch] = {}
        """All that ever were."""
        self.records: dict[int, Batch] = {}
        """Those on the orchestrator's disk, until they are durable."""
        self.checkpoint = 0
        """The trainer's newest on its disk, whether it has noticed by now or not."""
        self.writing: int | None = None
        """The step of the one that its thread writes."""
        self.start_orchestrator()
        self.start_trainer()

    # --- the orchestrator: sender and link ---

    def start_orchestrator(self) -> None:
        self.lives += 1
        self.delivery = Delivery("default", max(self.committed, default=0))
        self.delivery.sizes |= {step: batch.nbytes for step, batch in self.records.items()}
        self.held: dict[int, Batch] = {}
        self.offered: Batch | None = None
        self.outbox: deque[Offer | Commit] = deque()
        self.connect()

    def connect(self) -> None:
        for wire in self.wires:
            wire.alive = False
            wire.to_orchestrator.clear()
        self.lost_a_word = False
        self.link_session: int | None = None
        self.inbox: deque[ToOrchestrator] = deque()
        self.wire = Wire(f"wire-{len(self.wires)}".encode())
        self.wires.append(self.wire)
        self.wire.to_trainer.append(codec.encode_message(Hello("default", 0)))

    @precondition(lambda self: self.offered is None and self.delivery.newest_step < STEPS)
    @rule()
    def offer(self) -> None:
        self.offered = make_batch(self.delivery.newest_step + 1, self.lives)
        self.held[self.offered.step] = self.offered
        self.delivery.offer(self.offered.step, self.offered.nbytes)

    @precondition(lambda self: self.offered is not None)
    @rule()
    def commit(self) -> None:
        assert self.offered is not None
        self.committed[self.offered.step] = self.records[self.offered.step] = self.offered
        self.delivery.commit(self.offered.step)
        self.offered = None

    @rule()
    def sender_goes_on(self) -> None:
        self.hand_over()

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

    @precondition(lambda self: self.outbox)
    @rule()
    def write(self) -> None:
        message = self.outbox.popleft()
        if message.session == self.link_session:
            frames = codec.encode_offer(message) if isinstance(message, Offer) else codec.encode_message(message)
            self.wire.to_trainer.append(frames)

    @precondition(lambda self: self.wire.to_orchestrator)
    @rule()
    def read(self) -> None:
        message = codec.decode_message(self.wire.to_orchestrator.popleft())
        assert not isinstance(message, Hello | Commit)
        if isinstance(message, Ready):
            self.link_session = message.session
        elif isinstance(message, Rejected) and message.session is None and self.link_session is not None:
            self.connect()  # a greeting of an old connection was read after ours
            return
        self.inbox.append(message)

    @precondition(lambda self: self.inbox)
    @rule()
    def hear(self) -> None:
        message = self.inbox.popleft()
        self.delivery.receive(message)  # raises at the first REJECTED that concerns us
        if isinstance(message, Acknowledged):
            self.records = {step: batch for step, batch in self.records.items() if step > message.durable}
        self.held = {step: batch for step, batch in self.held.items() if step > self.delivery.acknowledged}

    # --- the trainer ---

    def start_trainer(self) -> None:
        self.socket = Socket(self.wires)
        config = TrainerConfig.model_validate(
            {"output_dir": self.directory, "model": "/model", "max_waiting_bytes": 120, "transport": {"credit": CREDIT}}
        )
        manager = MultiRunManager(self.directory, 1)
        self.registry = manager.registry
        self.sessions = Sessions(config, Receiver(self.socket, 2**20), manager)
        self.computing = Computing()
        stands_in: Any = self.computing
        self.early = EarlySteps(stands_in, stands_in, FairShare(64, 1))
        self.admit()

    def admit(self) -> None:
        self.run = occupy_slot(
            self.registry, make_run_config(self.directory, self.directory, steps=100), self.checkpoint
        )
        self.trained = {step: name_of(batch) for step, batch in self.committed.items() if step <= self.checkpoint}
        self.sessions.admit(self.run)

    @rule(which=st.integers(0, 9))
    def trainer_receives(self, which: int) -> None:
        self.receive(which)

    @rule()
    def trainer_begins_before_the_commit(self) -> None:
        if not self.sessions.has_next(self.run):
            self.early.begin(self.run)

    @rule()
    def trainer_trains(self) -> None:
        self.train()

    def receive(self, which: int) -> bool:
        talking = [wire for wire in self.wires if wire.to_trainer]
        if not talking:
            return False
        wire = talking[which % len(talking)]
        self.socket.arrived.append(Arrival(wire.name, "here", wire.to_trainer.popleft()))
        assert list(self.sessions.receive(0.0)) == [], "the run is evicted"
        return True

    def train(self) -> bool:
        batch = self.sessions.next_batch(self.run)
        if batch is None:
            return False
        assert batch.step == self.run.progress.step + 1
        assert batch.step in self.committed, "trained before it was committed"
        assert name_of(batch) == name_of(self.committed[batch.step]), "trained what was never committed"
        if self.early.takes(self.run, batch):
            begun = self.computing.open.pop(self.run.slot)
            assert name_of(begun) == name_of(batch), "trained what was not committed"
        assert self.computing.open == {}
        self.run.progress.step = batch.step
        self.trained[batch.step] = name_of(batch)
        self.registry.close_step(self.run.slot, 0.0)
        self.registry.advance(self.run.slot, 0.0)
        return True

    @precondition(lambda self: self.writing is None and self.checkpoint == self.run.durable_step)
    @rule()
    def begin_a_checkpoint(self) -> None:
        self.writing = self.run.progress.step

    @precondition(lambda self: self.writing is not None)
    @rule()
    def publish_the_checkpoint(self) -> None:
        assert self.writing is not None
        self.checkpoint, self.writing = self.writing, None

    @precondition(lambda self: self.checkpoint > self.run.durable_step)
    @rule()
    def notice_the_checkpoint(self) -> None:
        self.run.durable_step = self.checkpoint
        self.sessions.durable(self.run)

    @rule(moves=st.integers(1, 25), trained=st.booleans())
    def all_goes_well(self, moves: int, trained: bool) -> None:
        """For a while, with or without the trainer's own work."""
        for _ in range(moves):
            if self.offered is not None:
                self.commit()
            elif self.delivery.newest_step < STEPS:
                self.offer()
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

    @rule()
    def kill_the_orchestrator(self) -> None:
        self.start_orchestrator()

    @rule()
    def drain_the_orchestrator(self) -> None:
        while self.outbox:
            self.write()
        self.wire.to_trainer.append(codec.encode_message(Bye()))
        self.start_orchestrator()

    @rule()
    def kill_the_trainer(self) -> None:
        for wire in self.wires:
            wire.to_trainer.clear()
        self.writing = None  # what is half written is nothing
        self.connect()
        self.start_trainer()

    @rule()
    def lose_the_slot_and_get_it_back(self) -> None:
        """As when the run's configuration has changed: a new READY on the old connection. What is being written is waited for."""
        if self.writing is not None:
            self.publish_the_checkpoint()
        self.early.drop(self.run.slot)
        self.registry.vacate(self.run.slot)
        self.admit()

    # --- what must hold ---

    @invariant()
    def no_more_is_held_than_there_is_credit_for(self) -> None:
        assert len(self.run.waiting) <= CREDIT

    @invariant()
    def what_a_kill_would_make_the_trainer_ask_for_is_on_disk(self) -> None:
        assert set(range(self.checkpoint + 1, max(self.committed, default=0) + 1)) <= self.records.keys()

    def teardown(self) -> None:
        """Left alone, they come to rest with everything trained, acknowledged and forgotten."""
        if self.lost_a_word:
            self.connect()
        while self.move():
            pass
        if self.link_session is not None and self.delivery.acknowledged < self.delivery.newest_step:
            # A greeting of an old connection was read last, and has its place. It finds out with the next word that it says.
            self.wire.to_trainer.append(codec.encode_message(Commit(self.delivery.newest_step, self.link_session)))
        while self.move():
            pass
        assert self.trained == {step: name_of(batch) for step, batch in self.committed.items()}
        assert self.delivery.acknowledged == self.delivery.newest_step
        assert set(self.held) <= {self.delivery.newest_step + 1}

    def move(self, trained: bool = True) -> bool:
        """Does one of the things that may happen next; False when there is none."""
        for queue, act in ((self.outbox, self.write), (self.wire.to_orchestrator, self.read), (self.inbox, self.hear)):
            if queue:
                act()
                return True
        return self.hand_over() or self.receive(-1) or (trained and self.train())


@pytest.mark.slow
def test_every_committed_batch_is_trained_once_and_no_other(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.CRITICAL)  # thousands of refusals, which are as they should be
    DeliveryMachine.directory = tmp_path
    run_state_machine_as_test(DeliveryMachine, settings=settings(max_examples=200, stateful_step_count=60))
