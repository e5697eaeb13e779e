"""Keeps Python's cyclic garbage collector from holding the event loop.

A full collection walks every object there is: 290 ms with 4,096 rollouts in flight (`docs/performance.md`). What the daemon
makes leaves by reference counts alone, so it finds next to nothing; it is left in, a hundred times rarer, for what environments
make. Between two of them only the youngest objects are walked, each once.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG_COLLECTIONS_TO_A_FULL_ONE = 10_000
"""Python's default is 100, by way of middle ones, which walk again what the young ones left: 4 to 30 ms each with 4,096 rollouts
in flight. Here the first middle one would have as much to walk as a full one, so every one of them may be full."""


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Makes all but the short collections rare during the block."""
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, _YOUNG_COLLECTIONS_TO_A_FULL_ONE, 1)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, full)
        gc.unfreeze()


def set_apart() -> None:
    """Keeps all that lives now out of every collection until that block ends: what lives when rollouts begin lives long."""
    gc.collect()
    gc.freeze()
