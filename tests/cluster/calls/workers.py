"""Workers that call each other, for `test_worker_process.py`."""

from __future__ import annotations

import sys

import numpy as np

from counterpoint.cluster.calls.remote import remote
from counterpoint.cluster.errors import ActorDied
from counterpoint.cluster.worker import Worker


def say(text: object) -> None:
    """Says it in one write, since calls run beside `start`, and `print` makes several."""
    sys.stdout.write(f"said {text}\n")


class Scorer(Worker):
    """Is called, and calls back."""

    @remote(idempotent=True)
    def score(self, values: list[float]) -> list[float]:
        return [float(2 * value) for value in values]

    @remote
    def block(self) -> None:
        self.context.group("driver").call("started").result(60.0)
        self.context.stop.wait()


class Driver(Worker):
    """Calls, and says what it got."""

    @remote
    def started(self) -> None:
        say("blocked")

    def start(self) -> None:
        scorers = self.context.group("scorer")
        scorers.wait_until_callable(60.0)
        say(scorers.call_batch("score", [1.0, 2.0, 3.0]).result())
        say(scorers.call("score", np.ones(2), rank=0).result())
        try:
            scorers.call("block", rank=0).result()
        except ActorDied as error:
            say(f"died {error}")
        say(scorers.call("score", [4.0], rank=0).result())
