"""`PoolMeters`: what the pool counts and times for the metrics of its run (`transport/telemetry/catalogue/pool.py`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from transport.telemetry.catalogue.pool import TURN_SECONDS, UPDATE_SECONDS
from transport.telemetry.values import Histogram


class PoolMeters:
    """Counts since the pool began. Written on the loop; a scrape's thread reads."""

    def __init__(self) -> None:
        self.turn_seconds = Histogram(TURN_SECONDS.buckets)
        self.update_seconds = Histogram(UPDATE_SECONDS.buckets)
        self.retries = 0
        """Requests that failed at a server and were tried again."""
        self.unanswered = 0
        """Requests that got no answer in the end."""

    @contextmanager
    def timing(self, histogram: Histogram) -> Iterator[None]:
        """Times a block that ends well; a cancelled or failed one took another time."""
        began = time.perf_counter()
        yield
        histogram.observe(time.perf_counter() - began)
