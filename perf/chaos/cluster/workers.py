"""The workers of the chaos: sources put numbered records into a channel, trainers have them squared by scorers and commit them.

Each begins with a line in the witness's file and adds one several times a second for as long as it lives, so that two
incarnations of one worker that live at once are seen.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

from counterpoint.cluster.calls.group import RoleGroup
from counterpoint.cluster.calls.remote import remote
from counterpoint.cluster.channel.config import ChannelConfig
from counterpoint.cluster.channel.consumer import ChannelConsumer, LentRecord
from counterpoint.cluster.channel.exactly_once import CommitFile
from counterpoint.cluster.channel.host import HostWorker
from counterpoint.cluster.channel.producer import ChannelProducer
from counterpoint.cluster.worker import Context, Member, SubMaster, Worker
from perf.chaos.cluster.witness import Witness

CHANNEL = "records"
ENOUGH = "enough"
"""The file in the job's directory at which sources end."""
COMMITS = "commits"
"""The folder of the trainers' commits, in the job's directory."""

BEAT_SECONDS = 0.15
PACE_SECONDS = 0.05
POLL_SECONDS = 0.5
CALL_SECONDS = 60.0
MARKED = "chaos-"
"""How the names of shared memory begin; the name of the job's directory follows."""


def channel_config(directory: Path, sources: int) -> ChannelConfig:
    """Returns the channel of a job in that directory."""
    producers = tuple(f"source-{rank}" for rank in range(sources))
    return ChannelConfig(
        name=CHANNEL, producers=producers, capacity=64, directory=directory / "records", lease_seconds=5.0
    )


def beating(context: Context) -> Witness:
    """Returns the witness of this process, in which a thread says from now on that it lives."""
    witness = Witness(Path(context.directory), context.worker, context.incarnation)
    witness.note("begins")

    def beat() -> None:
        while True:
            threading.Event().wait(BEAT_SECONDS)
            witness.note("lives")

    threading.Thread(target=beat, name="witness", daemon=True).start()
    return witness


class Channels(HostWorker):
    """The host of the channel."""

    def __init__(self, context: Context) -> None:
        """Begins to beat."""
        super().__init__(context)
        beating(context)


class Plain(Worker):
    """A worker that beats, and has shared memory that must not outlive it."""

    def __init__(self, context: Context) -> None:
        """Begins to beat."""
        super().__init__(context)
        self.witness = beating(context)
        self._memory: SharedMemory | None = None

    def setup(self) -> None:
        """Takes shared memory, as many libraries do.

        Python's tracker, which frees it after a kill, runs before: otherwise it is started when the memory is there already.
        """
        resource_tracker.ensure_running()
        name = f"{MARKED}{Path(self.context.directory).parent.name}-{os.getpid()}"
        self._memory = SharedMemory(name=name, create=True, size=4096)

    def stop(self) -> None:
        """Frees it."""
        if self._memory is not None:
            self._memory.close()
            self._memory.unlink()
            self._memory = None


class Watcher(Plain):
    """A service with which the whole job is created again."""


class Scorer(Plain):
    """A service that is called."""

    @remote(idempotent=True)
    def square(self, numbers: list[int]) -> list[int]:
        """Returns the squares."""
        return [number * number for number in numbers]


class ScorerMaster(SubMaster):
    """Manages the scorers."""

    def __init__(self, context: Context) -> None:
        """Begins to beat."""
        super().__init__(context)
        self._witness = beating(context)

    def check_child(self, children: Sequence[Member]) -> None:
        """Notes whom it was given."""
        self._witness.note("checks", [[child.worker, child.incarnation] for child in children])


class Source(Plain):
    """A task: puts records until it has been enough."""

    def start(self) -> None:
        """Numbers them from the first that the channel lacks, and notes how far they are stored."""
        context = self.context
        config = ChannelConfig.model_validate(context.config["channel"])
        directory = Path(context.directory)
        with ChannelProducer(config, directory, context.worker, context.incarnation, window=32) as producer:
            self.witness.note("opens", producer.next_position)
            while not (directory / ENOUGH).exists():
                if context.stop.wait(PACE_SECONDS):
                    return
                self._put(producer)
            if not self._flush(producer):
                return
            self.witness.note("ends", producer.next_position)
            producer.end(CALL_SECONDS)

    def _put(self, producer: Any) -> None:
        position = producer.next_position
        try:
            stored = producer.send({"origin": self.context.worker, "position": position}, timeout=POLL_SECONDS)
        except TimeoutError:  # the channel is full, or its host is away
            return
        if position % 10 == 0:
            stored.add_done_callback(lambda done: None if done.exception() else self.witness.note("stored", position))

    def _flush(self, producer: Any) -> bool:
        while not self.context.stop.is_set():
            try:
                producer.flush(POLL_SECONDS)
                return True
            except TimeoutError:
                continue
        return False


class Trainer(Plain):
    """A task: commits each record once, with its square."""

    def start(self) -> None:
        """Commits until the stream ends."""
        context = self.context
        config = ChannelConfig.model_validate(context.config["channel"])
        directory = Path(context.directory)
        scorers = context.group("scorer")
        file = CommitFile(directory / COMMITS / f"{context.worker}.msgpack")
        try:
            self._train(config, directory, file, scorers)
        finally:
            file.close()

    def _train(self, config: ChannelConfig, directory: Path, file: CommitFile, scorers: RoleGroup) -> None:
        context = self.context
        state = file.state or []
        with ChannelConsumer(
            config, directory, context.worker, context.incarnation, credit=8, sticky=True, committed=file.positions
        ) as consumer:
            while not context.stop.is_set():
                try:
                    item = consumer.get(POLL_SECONDS)
                except TimeoutError:
                    continue
                if item is None:
                    return
                batch = [item, *consumer.take_ready(3)]
                squares = self._squares(scorers, [each.position for each in batch])
                if squares is None:
                    return
                state += [
                    [each.value["origin"], each.value["position"], square]
                    for each, square in zip(batch, squares, strict=True)
                ]
                self._commit(file, state, batch, config.name)

    def _squares(self, scorers: RoleGroup, numbers: list[int]) -> list[int] | None:
        """Returns the answer of a scorer; None if the worker is to stop before there is one."""
        call = scorers.call("square", numbers, timeout=CALL_SECONDS)
        while not self.context.stop.is_set():
            try:
                found: list[int] = call.result(POLL_SECONDS)
                return found
            except TimeoutError:
                if call.done():
                    raise
        return None

    def _commit(self, file: CommitFile, state: list[Any], batch: list[LentRecord], channel: str) -> None:
        self.witness.note("works")
        for each in batch:
            file.positions.add(channel, each.generation, each.sequence)
        file.commit(state, durable=False)
        self.witness.note("commits", [[each.origin, each.position] for each in batch])
        for each in batch:
            each.acknowledge()
