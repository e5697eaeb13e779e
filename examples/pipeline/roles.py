"""The roles: each runs its own loop, from one channel to the next, and nobody drives them.

Any of them, and the hosts of the channels, may be killed at any moment. A source computes where to go on from what the channel
has; tokenizers and samplers keep nothing; a trainer commits its table and the positions of the records in it by one atomic
write. So each record counts once. The argument is in `docs/cluster.md`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from counterpoint.cluster import HOST_SECONDS, POLL_SECONDS, Context, DataChannel, SelfLoopWorker, Worker, repeat
from examples.pipeline import letters

LAST_LINE = "."


class Source(Worker):
    """Puts every `count`-th line of the text, beginning with the one of its rank."""

    def start(self) -> None:
        """Puts the lines that the channel lacks, and ends after the text's last."""
        context, config = self.context, self.context.config
        with DataChannel(config["output"], context).producer() as producer:
            begun = producer.next_position
            for number, line in enumerate(lines_of(Path(context.directory) / config["text"], context.stop)):
                position, rank = divmod(number, context.count)
                if rank == context.rank and position >= begun:
                    repeat(partial(producer.send, line, timeout=POLL_SECONDS), context.stop)
            if repeat(partial(producer.flush, POLL_SECONDS), context.stop):
                producer.end(HOST_SECONDS)


class Tokenizer(SelfLoopWorker):
    """Makes ids of lines."""

    def process(self, record: str) -> letters.Ids:
        """Returns the ids of a line's letters."""
        return letters.tokenize(record)


class Sampler(SelfLoopWorker):
    """Draws pairs from ids, and leaves out lines without any."""

    def process(self, record: letters.Ids) -> letters.Ids | None:
        """Returns pairs of ids that follow each other, drawn by the record's name; None for a line without any."""
        assert self.item is not None
        return letters.draw(record, self.item.origin, self.item.position, self.context.config["draws"])


class Trainer(SelfLoopWorker):
    """Counts pairs. Its state is `<worker>.commit` in the job's directory: the table, and the names of the records in it."""

    def __init__(self, context: Context) -> None:
        """Begins with an empty table."""
        super().__init__(context)
        self._table = letters.empty_table()
        self._records: list[list[object]] = []

    def restore(self, state: Any) -> None:
        """Takes the table and the names that an earlier incarnation committed."""
        self._table = np.frombuffer(state["table"], dtype=np.int64).reshape(self._table.shape).copy()
        self._records = state["records"]

    def state(self) -> dict[str, Any]:
        """Returns both."""
        return {"table": self._table.tobytes(), "records": self._records}

    def status(self) -> str:
        """Returns what was counted so far."""
        return f"{len(self._records)} records, {letters.bits(self._table):.2f} bits a letter"

    def process(self, record: letters.Ids) -> None:
        """Counts a record's pairs."""
        assert self.item is not None
        letters.count(self._table, record)
        self._records.append([self.item.origin, self.item.position])


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
