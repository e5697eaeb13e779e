"""Requests outside the protocol, of `open_store.py` and `status.py`, that are sent again while the store is unavailable.

The requests of a lease are repeated by `protocol.py`, which knows how long the lease has left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from sweep.store import Unavailable

TRIES = 5
FIRST_PAUSE_SECONDS = 0.5
"""Between the first two tries; each further pause is twice as long."""

Answer = TypeVar("Answer")


def patiently(request: Callable[[], Answer]) -> Answer:
    """Returns what `request` returns, tried again after `Unavailable`. Raises the last `Unavailable`, and any other error."""
    pause = FIRST_PAUSE_SECONDS
    for _ in range(TRIES - 1):
        try:
            return request()
        except Unavailable:
            time.sleep(pause)
            pause *= 2
    return request()
