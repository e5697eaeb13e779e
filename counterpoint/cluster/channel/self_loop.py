"""A worker that runs its own loop: it pulls a record from one channel, processes it, and writes the result to another.

Its user writes only `process`. The role's `config` has the channels as tables, `input` and, except for a sink, `output`. A stage
acknowledges a record once what was made of it is stored; a sink commits its state together with the positions of the records in
it. So each record counts once, whichever process is killed (`docs/cluster.md`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from counterpoint.cluster.channel.config import ChannelConfig
from counterpoint.cluster.channel.consumer import ChannelConsumer, LentRecord
from counterpoint.cluster.channel.exactly_once import CommitFile
from counterpoint.cluster.channel.producer import ChannelProducer
from counterpoint.cluster.worker import Context, Worker

POLL_SECONDS = 0.05
"""How long a wait may keep a worker from noticing that it is to stop."""

HOST_SECONDS = 60.0
"""How long a channel may be without its host before a worker gives up, and is created again."""

BATCH = 8
"""Most records in one commit of a sink."""


class DataChannel:
    """A channel, as one worker of the job uses it: it has one end of it, or both."""

    def __init__(self, config: ChannelConfig | dict[str, Any], context: Context) -> None:
        """Takes the channel, such as a table of the role's `config`. Raises `ValidationError` for a table that is none."""
        self.config = config if isinstance(config, ChannelConfig) else ChannelConfig.model_validate(config)
        self._context = context
        self._who = self.config, Path(context.directory), context.worker, context.incarnation

    def producer(self) -> ChannelProducer:
        """Returns the end that puts records, for `with`.

        A task that returns without having ended its part of the stream has died: the stream would never end.
        """
        made = ChannelProducer(*self._who)
        self._context.left_open[f"producer of channel {self.config.name}"] = lambda: not made.has_ended
        return made

    def consumer(self, file: CommitFile | None = None) -> ChannelConsumer:
        """Returns the end that takes records, for `with`. With `file`, it is sticky, and skips what is committed there."""
        committed = None if file is None else file.positions
        return ChannelConsumer(*self._who, sticky=file is not None, committed=committed)


class SelfLoopWorker(Worker):
    """Processes records until the input ends or the job stops. Make its role a task."""

    def __init__(self, context: Context) -> None:
        """Reads the channels."""
        super().__init__(context)
        self.input = DataChannel(context.config["input"], context)
        self.output = DataChannel(context.config["output"], context) if "output" in context.config else None
        self.item: LentRecord | None = None
        """The record that is being processed, with its name: `origin` and `position`."""
        self.processed = 0
        """Records, by this incarnation."""

    def process(self, record: Any) -> Any:
        """Returns what is made of a record; None: nothing is. It must depend on the record and its name alone.

        A record is processed again if a worker dies before its result is stored. When this raises, the worker has died, and the
        record is lent again; after `max_deaths` of the channel it is set aside. A sink's result is ignored.
        """
        raise NotImplementedError(f"{type(self).__name__} lacks `process`")

    def state(self) -> Any:
        """Returns a sink's state after the records that it has processed, as msgpack values."""
        return None

    def restore(self, state: Any) -> None:
        """Takes what `state` returned when it was last committed; called before a sink's first record, if there is one."""

    def status(self) -> str:
        """Says how many records were processed."""
        return f"{self.processed} records"

    def start(self) -> None:
        """Runs the loop."""
        if self.output is None:
            self._run_sink()
        else:
            self._run_stage(self.output)

    def _run_stage(self, output: DataChannel) -> None:
        """Puts what is made of each item, under the item's name; acknowledges the item once that is stored."""
        stop = self.context.stop
        with output.producer() as producer, self.input.consumer() as consumer:
            for item in items_of(consumer, stop):
                made = self._processed(item)
                if made is None:
                    producer.skip(item, HOST_SECONDS)
                elif not repeat(partial(producer.send(made, item).result, POLL_SECONDS), stop):
                    return  # the channel stays full, and the item will be lent again
                item.acknowledge()
            if not stop.is_set():
                producer.end(HOST_SECONDS)

    def _run_sink(self) -> None:
        """Commits the state with the records in it, and acknowledges these afterwards."""
        file = CommitFile(Path(self.context.directory) / f"{self.context.worker}.commit")
        try:
            if file.state is not None:
                self.restore(file.state)
            with self.input.consumer(file) as consumer:
                for first in items_of(consumer, self.context.stop):
                    batch = [first, *consumer.take_ready(BATCH - 1)]
                    for item in batch:
                        self._processed(item)
                        file.positions.add(self.input.config.name, item.generation, item.sequence)
                    file.commit(self.state(), durable=False)
                    for item in batch:
                        item.acknowledge()
        finally:
            file.close()

    def _processed(self, item: LentRecord) -> Any:
        self.item = item
        made = self.process(item.value)
        self.processed += 1
        return made


def items_of(consumer: ChannelConsumer, stop: threading.Event) -> Iterator[LentRecord]:
    """Yields items until the stream ends or `stop`."""
    while not stop.is_set():
        try:
            item = consumer.get(POLL_SECONDS)
        except TimeoutError:
            continue
        if item is None:
            return
        yield item


def repeat(wait: Callable[[], object], stop: threading.Event) -> bool:
    """Repeats a short wait until it succeeds; returns False if `stop` comes first."""
    while not stop.is_set():
        try:
            wait()
        except TimeoutError:
            continue
        return True
    return False
