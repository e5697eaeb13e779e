"""The roles: each runs its own loop, from one channel to the next, and nobody drives them.

Any of them, and the hosts of the channels, may be killed at any moment. A source computes where to go on from what the channel
has; tokenizers and samplers keep nothing; a trainer commits its table and the positions of the records in it by one atomic
write. So each record counts once. The argument is in `docs/channel.md`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from cluster import ChannelConfig, ChannelConsumer, ChannelProducer, CommitFile, Context, Worker
from cluster.channel import Item
from examples.pipeline import letters

POLL_SECONDS = 0.05
"""How long a wait may keep a worker from noticing that it is to stop."""

HOST_SECONDS = 60.0
"""How long a channel may be without its host before a stage gives up, and is created again."""

LAST_LINE = "."

BATCH = 8
"""Most records in one commit."""


class Source(Worker):
    """Puts every `count`-th line of the text, beginning with the one of its rank."""

    def start(self) -> None:
        """Puts the lines that the channel lacks, and ends after the text's last."""
        context, config = self.context, self.context.config
        with _producer(context).blocking as producer:
            begun = producer.next_position
            for number, line in enumerate(lines_of(Path(context.directory) / config["text"], context.stop)):
                position, rank = divmod(number, context.count)
                if rank == context.rank and position >= begun:
                    repeat(partial(producer.send, line, timeout=POLL_SECONDS), context.stop)
            if repeat(partial(producer.flush, POLL_SECONDS), context.stop):
                producer.end(HOST_SECONDS)


class Tokenizer(Worker):
    """Makes ids of lines."""

    def start(self) -> None:
        """Runs until the lines end."""
        _run_stage(self.context, lambda item: letters.tokenize(item.value))


class Sampler(Worker):
    """Draws pairs from ids, and leaves out lines without any."""

    def start(self) -> None:
        """Runs until the ids end."""
        draws = self.context.config["draws"]
        _run_stage(self.context, lambda item: letters.draw(item.value, item.origin, item.position, draws))


class Trainer(Worker):
    """Counts pairs. Its state is `<worker>.commit` in the job's directory: the table, and the names of the records in it."""

    def setup(self) -> None:
        """Reads what an earlier incarnation committed."""
        self._file = CommitFile(Path(self.context.directory) / f"{self.context.worker}.commit")
        state = self._file.state or {"table": letters.empty_table().tobytes(), "records": []}
        self._table = np.frombuffer(state["table"], dtype=np.int64).reshape(letters.empty_table().shape).copy()
        self._records: list[list[object]] = state["records"]

    def status(self) -> str:
        """Returns what was counted so far."""
        return f"{len(self._records)} records, {letters.bits(self._table):.2f} bits a letter"

    def start(self) -> None:
        """Runs until the pairs end. Records are acknowledged after the write that has them."""
        channel = ChannelConfig.model_validate(self.context.config["input"])
        with _consumer(self.context, sticky=True, file=self._file) as consumer:
            for item in items_of(consumer, self.context.stop):
                batch = [item, *consumer.take_ready(BATCH - 1)]
                for each in batch:
                    letters.count(self._table, each.value)
                    self._records.append([each.origin, each.position])
                    self._file.positions.add(channel.name, each.generation, each.sequence)
                self._file.commit({"table": self._table.tobytes(), "records": self._records}, durable=False)
                for each in batch:
                    each.acknowledge()
        self._file.close()


def lines_of(path: Path, stop: threading.Event) -> Iterator[str]:
    """Yields the lines of a text that may still grow, until its last line or `stop`."""
    with path.open("rb") as file:
        while not stop.is_set():
            place = file.tell()
            line = file.readline()
            if not line.endswith(b"\n"):  # not written yet, or half
                file.seek(place)
                stop.wait(POLL_SECONDS)
                continue
            text = line[:-1].decode(errors="replace")
            if text == LAST_LINE:
                return
            yield text


def items_of(consumer: ChannelConsumer, stop: threading.Event) -> Iterator[Item]:
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


def _run_stage(context: Context, work: Callable[[Item], letters.Ids | None]) -> None:
    """Puts what `work` makes of each item, under the item's name; acknowledges the item once that is stored."""
    with _producer(context).blocking as producer, _consumer(context) as consumer:
        for item in items_of(consumer, context.stop):
            made = work(item)
            if made is None:
                producer.skip(item, HOST_SECONDS)
            elif not repeat(partial(producer.send(made, item).result, POLL_SECONDS), context.stop):
                return  # the channel stays full, and the item will be lent again
            item.acknowledge()
        if not context.stop.is_set():
            producer.end(HOST_SECONDS)


def _producer(context: Context) -> ChannelProducer:
    channel = ChannelConfig.model_validate(context.config["output"])
    return ChannelProducer(channel, Path(context.directory), context.worker, context.incarnation)


def _consumer(context: Context, sticky: bool = False, file: CommitFile | None = None) -> ChannelConsumer:
    channel = ChannelConfig.model_validate(context.config["input"])
    committed = None if file is None else file.positions
    return ChannelConsumer(
        channel, Path(context.directory), context.worker, context.incarnation, sticky=sticky, committed=committed
    )
