"""The process of one sink: reads the job's files, gives the rows to the sink, and reports after each pass that it is alive.

`python -m counterpoint.job.tracking.sink_process SPECIFICATION`: its output gets a line after each pass, with the number of rows
sent. When its input is closed, it sends what is left and ends with 0. `counterpoint/job/tracking/tracking.py` starts it.
"""

from __future__ import annotations

import importlib
import logging
import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from counterpoint.job.tracking.feed import Feed
from counterpoint.job.tracking.follow import Follower, State
from counterpoint.job.tracking.rows import Sink, Target
from counterpoint.transport.exact_json import dumps, loads
from counterpoint.transport.files.lock import take_lock

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0

ROWS_PER_FLUSH = 200
"""Rows after which the state is written, so that little is repeated after a kill."""


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """Which sink follows which job."""

    name: str
    """The name of its folder and its state in `tracking/`."""
    sink: str
    """`package.module:Class`, a `Sink` made from a `Target`."""
    job: str
    """The directory of the job."""
    group: str
    options: dict[str, Any] = field(default_factory=dict)
    poll_seconds: float = POLL_SECONDS

    def to_json(self) -> str:
        """Returns it for a command line."""
        return dumps(asdict(self)).decode()

    @classmethod
    def of_json(cls, text: str) -> SinkSpec:
        """The reverse of `to_json`."""
        return cls(**loads(text))


def run(spec: SinkSpec, over: Callable[[float], bool], beat: Callable[[int], None]) -> None:
    """Follows the job until it is `over`, then sends what is left.

    `over` is asked after each pass, and waits for so many seconds before it says no. `beat` gets the number of rows sent. Raises
    whatever the sink raises: another process tries again.
    """
    directory = Path(spec.job) / "tracking"
    (directory / spec.name).mkdir(parents=True, exist_ok=True)
    lock = take_lock(
        directory / f"{spec.name}.lock", f"another process sends this job to {spec.name}; stop that one first"
    )
    try:
        state = State(directory / f"{spec.name}.json")
        state.save()  # its identity is durable before the sink sees it
        module, _, name = spec.sink.partition(":")
        identity = state.content["identity"]
        target = Target(Path(spec.job), directory / spec.name, spec.group, identity, spec.options)
        sink: Sink = getattr(importlib.import_module(module), name)(target)
        follower = Follower(Path(spec.job), state, sink.last_step)
        sent, ending = 0, False
        beat(sent)
        while True:
            fresh = follower.read()
            for run in follower.runs.values():
                for _ in _send(run.feed, sink, over=ending and not fresh):
                    sent += 1
                    beat(sent)
                    if sent % ROWS_PER_FLUSH == 0:
                        sink.flush()
                        follower.save()
                if run.feed.rewound is not None:
                    run.feed.settle_rewind(replaced=_rewind(run.feed, sink, spec.name))
                    run.shipped.restart()
                    fresh = True
            sink.flush()
            follower.save()
            beat(sent)
            if ending and not fresh:
                break
            ending = ending or over(0.0 if fresh else spec.poll_seconds)
        sink.close()
    finally:
        os.close(lock)


def _send(feed: Feed, sink: Sink, over: bool) -> Any:
    """Sends what is complete; yields after each row."""
    if feed.rewound is not None:
        return
    for row in feed.rows(over):
        sink.write(row)
        yield
        for result in feed.due_results(over=False):
            sink.write_evaluation(result)
    for result in feed.due_results(over):
        sink.write_evaluation(result)


def _rewind(feed: Feed, sink: Sink, name: str) -> bool:
    assert feed.rewound is not None
    replaced = sink.rewind(feed.run_id, feed.rewound)
    logger.warning(
        "run %s: steps from %d on are trained again; %s",
        feed.run_id,
        feed.rewound,
        "their metrics are replaced"
        if replaced
        else f"{name} keeps the metrics that it has of steps up to {feed.last}",
    )
    return replaced


def main() -> None:
    """Runs the process below `tracking.py`: it ends when its input does, and reports at its output."""
    spec = SinkSpec.of_json(sys.argv[1])
    reports = os.dup(1)
    os.dup2(2, 1)  # for whatever a library prints
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {spec.name}: %(message)s", stream=sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent asks in order
    os.set_blocking(reports, False)

    def over(seconds: float) -> bool:
        return bool(select.select([0], [], [], seconds)[0])

    def beat(sent: int) -> None:
        with suppress(BlockingIOError):  # the parent has enough to read
            os.write(reports, b"%d\n" % sent)

    run(spec, over, beat)


if __name__ == "__main__":
    main()
