"""Two orchestrators of one run, on two hosts: one takes over from a copy of the other's directory, and the other comes back.

Both ends' real logic over wires that the test plays, as in `test_delivery_machine.py`.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from counterpoint.orchestrator import take_over
from counterpoint.orchestrator.step.delivery import ConflictError, Delivery, EvictedError, SendBatch
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.runs.epochs import Epochs
from counterpoint.trainer.runs.manager import MultiRunManager
from counterpoint.trainer.runs.run import RunProgress
from counterpoint.trainer.work.sessions import Sessions
from counterpoint.transport import codec
from counterpoint.transport.files.atomic import Buffer, publish_directory
from counterpoint.transport.messages import Commit, Hello, Offer, Ready
from counterpoint.transport.records import Batch, SampleInfo
from counterpoint.transport.wires.receiver import Receiver
from counterpoint.transport.wires.zmq_wire import Arrival, ZmqListener
from tests.trainer.conftest import end_step, make_run_config, new_order, occupy_slot, take_batch


def make_batch(step: int, author: str) -> Batch:
    """A step's batch, which differs only in its rollout's name."""
    return Batch(
        run_id="default",
        step=step,
        samples=(SampleInfo(f"{author}-{step}", "toy", 0, 1.0, 1.0),),
        columns={
            "token_ids_T": np.zeros(2, np.int32),
            "loss_mask_T": np.ones(2, np.uint8),
            "log_probabilities_T": np.zeros(2, np.float32),
            "advantages_T": np.zeros(2, np.float32),
            "sample_offsets": np.array([0, 2], np.int64),
        },
    )


class Host:
    """A process of the orchestrator: its directory with the epoch, and its committed batches."""

    def __init__(self, name: str, directory: Path, committed: dict[int, Batch], connections: list[bytes]) -> None:
        self.name, self.directory, self.committed = name, directory, committed
        self.epoch = take_over.propose(directory)
        self.delivery = Delivery("default", max(committed, default=0))
        self._connections = connections
        self._session = 0

    def hello(self) -> list[Buffer]:
        self.sender = f"{self.name}-{len(self._connections)}".encode()
        self._connections.append(self.sender)
        return codec.encode_message(Hello("default", 0, self.epoch.epoch, self.epoch.holder))

    def generate(self) -> None:
        """Plays and commits the next step."""
        step = self.delivery.newest_step + 1
        self.committed[step] = make_batch(step, self.name)
        self.delivery.offer(step, self.committed[step].nbytes)
        self.delivery.commit(step)

    def hear(self, frames: list[Buffer]) -> None:
        """Does as `orchestrator.step.sender` does. Raises what ends the process."""
        message = codec.decode_message(frames)
        assert not isinstance(message, Hello | Commit)
        if isinstance(message, Ready):
            own = self.committed.get(message.next_step - 1)
            if message.batch and own is not None and codec.digest_of(own) != message.batch:
                raise ConflictError("another batch")
        self.delivery.receive(message)
        if isinstance(message, Ready):
            take_over.keep(self.directory, self.epoch)

    def due(self) -> list[Buffer] | None:
        due = self.delivery.next()
        if due is None:
            return None
        if isinstance(due, SendBatch):
            return codec.encode_offer(Offer(self.committed[due.step], due.session))
        return codec.encode_message(Commit(due.step, due.session), "default")


@dataclass
class Trainer(ZmqListener):
    """Rank 0's side of the wire, and the training of a step."""

    directory: Path
    trained: list[str] = field(default_factory=list)
    arriving: deque[Arrival] = field(default_factory=deque)
    answers: list[tuple[bytes, list[Buffer]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start(RunProgress())

    def start(self, progress: RunProgress) -> None:
        """Starts a process with a checkpoint of that progress."""
        manager = MultiRunManager(self.directory, 1)
        config = TrainerConfig(output_dir=self.directory, model="/model")
        receiver = Receiver(self, 2**20, Epochs(self.directory, manager).refusal)
        self.order = new_order(progress.step)
        self.sessions = Sessions(config, receiver, manager, {0: self.order})
        self.run = occupy_slot(manager.registry, make_run_config(self.directory, self.directory, steps=100))
        manager.registry.find("default").directory = (self.directory / "run_default").stat().st_ino  # type: ignore[union-attr]
        self.run.progress = progress
        self.registry = manager.registry
        self.sessions.admit(self.run)

    def poll(self, timeout: float) -> Arrival | None:
        return self.arriving.popleft() if self.arriving else None

    def write(self, sender: bytes, frames: Sequence[Buffer]) -> bool:
        self.answers.append((sender, list(frames)))
        return True

    def close(self, linger: float) -> None:
        """There is nothing to free."""

    def open(self) -> bool:
        batch = take_batch(self.sessions, self.run, self.order)
        if batch is not None:
            self.trained.append(batch.samples[0].rollout_id)
        return batch is not None

    def finish(self) -> None:
        """Ends the open step, as `trainer.loop` does."""
        end_step(self.run, self.order)


@dataclass
class World:
    trainer: Trainer
    connections: list[bytes] = field(default_factory=list)

    def host(self, name: str, copy_of: Host | None = None) -> Host:
        """Starts an orchestrator: in a directory of that name, or in one that is first made as a copy."""
        directory = self.trainer.directory / name
        if copy_of is not None:
            shutil.copytree(copy_of.directory, directory)
        directory.mkdir(exist_ok=True)
        return Host(name, directory, dict(copy_of.committed) if copy_of is not None else {}, self.connections)

    def again(self, host: Host) -> Host:
        """Starts another process in the same directory."""
        return Host(host.name, host.directory, host.committed, self.connections)

    def connect(self, host: Host) -> None:
        self.say(host, host.hello())
        self.settle(host, train=False)

    def say(self, host: Host, frames: list[Buffer]) -> None:
        """Delivers a message to the trainer, and its answers to the host if they are for its newest connection."""
        self.trainer.arriving.append(Arrival(host.sender, host.name, frames))
        assert list(self.trainer.sessions.receive(0.0)) == [], "no run is evicted"

    def settle(self, host: Host, train: bool = True) -> None:
        """Until neither the host nor the trainer has anything to do."""
        moved = True
        while moved:
            answers, self.trainer.answers = self.trainer.answers, []
            for sender, frames in answers:
                if sender == host.sender:
                    host.hear(frames)
            moved = bool(answers)
            if (due := host.due()) is not None:
                self.say(host, due)
                moved = True
            elif train and self.trainer.open():
                self.trainer.finish()
                moved = True


@pytest.fixture
def world(tmp_path: Path) -> World:
    (tmp_path / "run_default").mkdir()
    return World(Trainer(tmp_path))


def trained_to(world: World, step: int) -> Host:
    """An orchestrator whose steps are trained up to that one."""
    first = world.host("first")
    world.connect(first)
    for _ in range(step):
        first.generate()
    world.settle(first)
    return first


@pytest.mark.parametrize("trainer_restarts", [False, True])
def test_a_healed_orchestrator_ends_and_the_one_that_took_over_goes_on(world: World, trainer_restarts: bool) -> None:
    first = trained_to(world, 3)
    second = world.host("second", copy_of=first)
    first.generate()  # while it is cut off
    world.connect(second)
    second.generate()
    world.settle(second)
    if trainer_restarts:
        world.trainer.start(world.trainer.run.progress)
        world.connect(second)
    for each in (first, world.again(first), world.again(first)):  # its supervisor tries again
        with pytest.raises(EvictedError, match=r"taken over by process .* \(epoch 2\)"):
            world.connect(each)
    second.generate()
    world.settle(second)
    assert world.trainer.trained == ["first-1", "first-2", "first-3", "second-4", "second-5"]
    after = world.again(second)
    world.connect(after)
    after.generate()
    world.settle(after)
    assert world.trainer.trained[-1] == "second-6", "a take-over in the same directory works as ever"


def test_a_commit_of_the_old_connection_is_not_heard(world: World) -> None:
    """The old one is cut off in one direction, and its connection lives on."""
    first = trained_to(world, 1)
    second = world.host("second", copy_of=first)
    first.generate()
    old = [first.due() for _ in range(2)]
    world.connect(second)
    for frames in old:
        assert frames is not None
        world.say(first, frames)
    assert not world.trainer.open()
    second.generate()
    world.settle(second)
    assert world.trainer.trained == ["first-1", "second-2"]


def test_a_take_over_behind_the_trainer_ends_and_the_first_goes_on(world: World) -> None:
    first = trained_to(world, 1)
    second = world.host("second", copy_of=first)
    first.generate()
    world.settle(first)
    with pytest.raises(ConflictError):
        world.connect(second)
    second.generate()  # now it has as many steps, but not the same
    with pytest.raises(ConflictError):
        world.connect(second)
    world.connect(first)
    first.generate()
    world.settle(first)
    assert world.trainer.trained == ["first-1", "first-2", "first-3"]


@pytest.mark.parametrize("opened", [False, True])
def test_what_the_former_one_had_sent_is_trained_only_if_it_was_begun(world: World, opened: bool) -> None:
    first = trained_to(world, 1)
    second = world.host("second", copy_of=first)
    first.generate()
    first.generate()
    world.settle(first, train=False)
    assert not opened or world.trainer.open()
    second.generate()
    if opened:
        with pytest.raises(ConflictError):
            world.connect(second)
        world.trainer.finish()
        world.connect(first)
        world.settle(first)
        assert world.trainer.trained == ["first-1", "first-2", "first-3"]
    else:
        world.connect(second)
        world.settle(second)
        assert world.trainer.trained == ["first-1", "second-2"]


def test_a_process_that_was_killed_before_it_kept_its_epoch_is_followed(world: World) -> None:
    first = trained_to(world, 1)
    killed = world.again(first)
    world.say(killed, killed.hello())
    world.trainer.answers.clear()  # it never reads its READY
    after = world.again(first)
    world.connect(after)
    after.generate()
    world.settle(after)
    assert world.trainer.trained == ["first-1", "first-2"]


def test_another_batch_of_a_known_step_is_a_conflict_and_no_repetition(world: World) -> None:
    first = trained_to(world, 1)
    session = world.trainer.run.wire.session
    assert session is not None
    world.say(first, codec.encode_offer(Offer(make_batch(1, "first"), session)))
    world.settle(first)
    world.say(first, codec.encode_offer(Offer(make_batch(1, "another"), session)))
    with pytest.raises(EvictedError, match="another batch"):
        world.settle(first)


def test_another_run_of_the_name_of_a_deleted_one_is_no_older_process(world: World) -> None:
    first = trained_to(world, 1)
    world.connect(world.again(first))
    directory = world.trainer.directory / "run_default"
    held = os.open(directory, os.O_PATH)
    directory.rmdir()
    directory.mkdir()
    os.close(held)
    new = world.host("new")
    world.say(new, new.hello())
    assert world.trainer.answers == [], "it waits until the deletion is discovered"


def made_anew(world: World, former: Host, committed: bool = False) -> Host:
    """The run's directory was deleted and made anew while no trainer ran: another run. The trainer then starts."""
    directory = world.trainer.directory / "run_default"
    shutil.rmtree(directory)
    (directory / "checkpoints").mkdir(parents=True)
    if committed:
        with publish_directory(directory / "checkpoints" / "step_1"):
            pass
    manager = MultiRunManager(world.trainer.directory, 1)
    config = TrainerConfig(output_dir=world.trainer.directory, model="/model")
    receiver = Receiver(world.trainer, 2**20, Epochs(world.trainer.directory, manager).refusal)
    world.trainer.sessions = Sessions(config, receiver, manager, {0: world.trainer.order})
    return Host("run_default", directory, {}, world.connections)


@pytest.fixture
def former(world: World) -> Host:
    """A run in the trainer's own view of its directory, taken over once."""
    world.connect(world.host("run_default"))
    again = world.again(world.host("run_default"))
    world.connect(again)
    again.generate()
    world.settle(again)
    return again


def test_a_run_that_was_made_anew_while_no_trainer_ran_begins_anew(world: World, former: Host) -> None:
    new = made_anew(world, former)
    world.say(new, new.hello())
    assert world.trainer.answers == [], "it is not sent away"
    kept = world.trainer.directory / "trainer"
    assert [path.name for path in kept.iterdir()] == [".deleted-default"], "nothing is lost"


def test_a_run_with_steps_whose_epoch_file_was_lost_is_none_that_was_made_anew(world: World, former: Host) -> None:
    new = made_anew(world, former, committed=True)
    with pytest.raises(EvictedError, match="taken over") as ended:
        world.connect(new)
    kept = world.trainer.directory / "trainer" / "default"
    assert kept.is_dir()
    assert str(kept) in str(ended.value), "the way out"


def test_a_client_that_states_no_epoch_is_not_told_that_it_was_taken_over(world: World) -> None:
    trained_to(world, 1)
    manager = MultiRunManager(world.trainer.directory, 1)
    refused = Epochs(world.trainer.directory, manager).refusal(Hello("default", 0))
    assert refused is not None
    assert "taken over" not in refused
    assert "states no epoch" in refused


def test_an_epoch_that_nobody_can_follow_is_refused(world: World) -> None:
    trained_to(world, 1)
    epochs = Epochs(world.trainer.directory, MultiRunManager(world.trainer.directory, 1))
    refused = epochs.refusal(Hello("default", 0, 2**64 - 1, "somebody"))
    assert refused is not None
    assert str(2**64 - 1) in refused
    assert epochs.refusal(Hello("default", 0, 1000, "somebody")) is None


def test_a_record_that_cannot_be_read_or_written_again_refuses_its_run_alone(world: World) -> None:
    trained_to(world, 1)
    manager = MultiRunManager(world.trainer.directory, 1)
    epochs = Epochs(world.trainer.directory, manager)
    record = world.trainer.directory / "trainer" / "default" / "epoch.json"
    refused = epochs.refusal(Hello("default", 0, 9, "x" * 20_000))
    assert refused is not None
    assert "a holder of 20000 characters" in refused
    record.unlink()
    record.mkdir()
    refused = epochs.refusal(Hello("default", 0, 9, "next"))
    assert refused is not None
    assert str(record) in refused
