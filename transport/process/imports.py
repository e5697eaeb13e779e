"""Imports large libraries in less time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """Keeps the garbage collector from running during the block, and what there is at its end from ever being visited.

    torch and transformers make a million objects while they are imported, and no garbage. Collections visit them again and again,
    which is a fifth of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
