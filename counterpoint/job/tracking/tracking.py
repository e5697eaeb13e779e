"""Feeds each sink of a job in a thread of its own, and makes one that raises anew, for as long as it takes.

All are in one process, which only reads the job's files: nothing can touch training, and none holds up another. A sink that hangs
is named, and nobody waits for it at the end; `counterpoint track` can send later what it lacks. A job runs this as one worker,
which is not essential and is started again if a library ends it.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from counterpoint.job.tracking.feed import Feed
from counterpoint.job.tracking.follow import JobFollower, SinkState
from counterpoint.job.tracking.rows import Sink, SinkSpec
from counterpoint.transport.files.lock import take_lock

logger = logging.getLogger(__name__)

LONGEST_PAUSE_SECONDS = 60.0
POLL_SECONDS = 0.25

ROWS_PER_FLUSH = 200
"""Rows after which the state is written, so that little is repeated after a kill."""


@dataclass(frozen=True, slots=True)
class SinkPatience:
    """How patient `Tracking` is."""

    first_pause_seconds: float = 1.0
    stall_seconds: float = 120.0
    """A sink that takes nothing and makes no pass for so long hangs."""
    finish_seconds: float = 60.0
    """How long the sinks may take in the end to send what is left."""
    follow_seconds: float = 1.0
    """The pause between two looks at the files."""


class Tracking:
    """The sinks of one job."""

    def __init__(self, specs: Sequence[SinkSpec], limits: SinkPatience | None = None) -> None:
        self._limits = limits or SinkPatience()
        self._ending = threading.Event()
        self._sinks = [_Fed(spec, self._limits, self._ending) for spec in specs]

    def run(
        self,
        over: Callable[[], bool],
        watch: Callable[[str], None] = lambda trouble: None,
        hurry: Callable[[], bool] = lambda: True,
    ) -> list[str]:
        """Runs until `over`, and sends what is left then. Returns the names of the sinks that lack something.

        `watch` is called about four times a second, with what is wrong or with an empty text. Without `hurry` the end takes as
        long as the sinks make progress, with it `finish_seconds`.
        """
        for sink in self._sinks:
            threading.Thread(target=sink.feed, name=sink.spec.name, daemon=True).start()
        until = math.inf
        try:
            while True:
                if self._ending.is_set() or over():
                    self._ending.set()
                    if hurry():
                        until = min(until, time.monotonic() + self._limits.finish_seconds)
                    if time.monotonic() >= until or all(sink.ended or sink.hangs for sink in self._sinks):
                        break
                time.sleep(POLL_SECONDS)
                watch("; ".join(trouble for sink in self._sinks if (trouble := sink.trouble)))
        finally:
            self._ending.set()
        lacking = [sink.spec for sink in self._sinks if not sink.has_everything]
        for spec in lacking:
            logger.warning(
                "%s did not get everything; `counterpoint track %s --to %s` sends what it lacks",
                spec.name,
                spec.job,
                spec.name,
            )
        return [spec.name for spec in lacking]


class _Fed:
    """One sink, which a thread feeds. Other threads read its attributes."""

    def __init__(self, spec: SinkSpec, limits: SinkPatience, ending: threading.Event) -> None:
        """`ending`: what is left is to be sent."""
        self.spec = spec
        self.has_everything = False
        self.ended = False
        """Whether nothing more will be sent."""
        self._failures = 0
        """Failures in a row, without a row sent in between."""
        self._reason = ""
        """Why it failed last."""
        self._moved = time.monotonic()
        self._limits, self._ending = limits, ending

    @property
    def hangs(self) -> bool:
        """Whether it has done nothing for too long."""
        return not self.ended and time.monotonic() - self._moved > self._limits.stall_seconds

    @property
    def trouble(self) -> str:
        """Says what is wrong, for people."""
        if self.hangs:
            return f"{self.spec.name} hangs: it has taken nothing for {self._limits.stall_seconds:g} s"
        return f"{self.spec.name} {self._reason}" if self._failures else ""

    def feed(self) -> None:
        """Feeds the sink until it has everything. After `ending` begins, it is made once more at most."""
        while not self.ended:
            is_last = self._ending.is_set()
            try:
                self._send_everything()
            except Exception as error:  # a sink's library may raise anything
                pause = min(self._limits.first_pause_seconds * 2 ** min(self._failures, 9), LONGEST_PAUSE_SECONDS)
                self._failures += 1
                self._reason = f"failed: {type(error).__name__}: {error}"
                logger.warning("%s failed, and is tried again in %g s", self.spec.name, pause, exc_info=True)
                self._moved = time.monotonic()
                self._ending.wait(pause)
                self.ended = is_last
            else:
                self.has_everything = self.ended = True

    def _send_everything(self) -> None:
        """Raises whatever the sink raises."""
        spec = self.spec
        spec.directory.mkdir(parents=True, exist_ok=True)
        lock = take_lock(
            spec.directory.with_suffix(".lock"),
            f"another process sends this job to {spec.name}; stop that one first",
        )
        try:
            state = SinkState(spec.directory.with_suffix(".json"))
            state.save()  # its identity is durable before the sink sees it
            sink = spec.sink(spec, state.content["identity"])
            try:
                self._follow(sink, JobFollower(spec.job, state, sink.last_step))
            finally:
                sink.close()
        finally:
            os.close(lock)

    def _follow(self, sink: Sink, follower: JobFollower) -> None:
        """Follows the job until it is over, then sends what is left."""
        sent, ending = 0, False
        while True:
            fresh = follower.read()
            for run in follower.runs.values():
                for _ in _sending(run.feed, sink, over=ending and not fresh):
                    sent += 1
                    self._failures, self._moved = 0, time.monotonic()
                    if sent % ROWS_PER_FLUSH == 0:
                        sink.flush()
                        follower.save()
                if run.feed.rewound is not None:
                    run.feed.settle_rewind(replaced=self._rewind(run.feed, sink))
                    run.shipped.restart()
                    fresh = True
            sink.flush()
            follower.save()
            self._moved = time.monotonic()
            if ending and not fresh:
                return
            ending = ending or self._ending.wait(0.0 if fresh else self._limits.follow_seconds)

    def _rewind(self, feed: Feed, sink: Sink) -> bool:
        assert feed.rewound is not None
        replaced = sink.rewind(feed.run_id, feed.rewound)
        kept = f"{self.spec.name} keeps the metrics that it has of steps up to {feed.last}"
        said = "their metrics are replaced" if replaced else kept
        logger.warning("run %s: steps from %d on are trained again; %s", feed.run_id, feed.rewound, said)
        return replaced


def _sending(feed: Feed, sink: Sink, over: bool) -> Iterator[None]:
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
