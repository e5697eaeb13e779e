"""Many inference servers in one process, which answer by a law of lengths and fail at times: `perf.bench.fleet` asks them.

Each path `/N` is a server of its own, with weights of its own.

    python -m perf.soak.fleet_servers MEDIAN_SECONDS FAILED_SHARE
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from random import Random

import uvloop

from counterpoint.inference import wire
from perf.bench.servers import Answers, Connection, response, serve
from perf.soak.answering import WholeJobAnswers

SPREAD = 0.7
"""The logarithm of an answer's seconds has this deviation."""

LONGEST = 5.0
"""Medians that an answer takes at most."""


class Servers(Answers):
    """The answers of all servers of the process."""

    def __init__(self) -> None:
        super().__init__(0, 0)
        self._by_name: defaultdict[str, WholeJobAnswers] = defaultdict(WholeJobAnswers)

    def to(self, path: str, body: bytes) -> Sequence[bytes]:
        """See `Answers.to`."""
        _, name, rest = path.split("/", 2)
        return self._by_name[name].to(f"/{rest}", body)


class FleetConnection(Connection):
    """Answers after a time of the law if a completion was asked for, at once otherwise; fails at times.

    It then closes, or answers 503 where other calls share the connection.
    """

    def __init__(self, answers: Answers, median: float, failed: float, random: Random) -> None:
        super().__init__(answers, 0.0)
        self._median, self._failed, self._random = median, failed, random

    def respond(self, path: str, body: bytes, number: int | None) -> None:
        """See `Connection.respond`."""
        if not path.endswith(wire.GENERATE_PATH):
            super().respond(path, body, number)
            return
        seconds = self._median * min(LONGEST, math.exp(self._random.gauss(0.0, SPREAD)))
        if self._random.random() >= self._failed:
            self.send_later(seconds, self._answers.to(path, body), number)
        elif number is None:
            asyncio.get_running_loop().call_later(seconds, self._transport.abort)
        else:
            self.send_later(seconds, [response(b"", "503 Service Unavailable")], number)


if __name__ == "__main__":
    law = float(sys.argv[1]), float(sys.argv[2]), Random(0)
    uvloop.run(serve(partial(FleetConnection, Servers(), *law)))
