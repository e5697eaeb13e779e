"""Keeps Python's cyclic garbage collector from holding the event loop.

A full collection walks every object there is: 290 ms with 4,096 rollouts in flight (`docs/performance.md`). What the daemon
makes leaves by reference counts alone, so it finds next to nothing; it is left in, a hundred times rarer, for what environments
make. Middle ones come sooner, and are the shorter for it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG_COLLECTIONS_TO_A_MIDDLE_ONE = 2
"""Python's default is 10, with which a middle one takes 10 to 20 ms beside 4,096 rollouts in flight, instead of 4."""

_MIDDLE_COLLECTIONS_TO_A_FULL_ONE = 5000
"""Python's default is 10."""


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Makes full collections rare, and middle ones short, during the block."""
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, _YOUNG_COLLECTIONS_TO_A_MIDDLE_ONE, _MIDDLE_COLLECTIONS_TO_A_FULL_ONE)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, full)
        gc.unfreeze()


def set_apart() -> None:
    """Keeps all that lives now out of every collection until that block ends: what lives when rollouts begin lives long."""
    gc.collect()
    gc.freeze()
