"""Imports large libraries in less time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNUSED_BY_TRAINERS = ("scipy",)
"""Modules that transformers imports where they are installed, and that no trainer needs. scipy, for its losses of object
detection, is a fifth of the CPU of a trainer's imports."""


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


@contextmanager
def without_modules(*names: str) -> Iterator[None]:
    """Makes imports of these modules fail during the block, as if they were not installed; afterwards they work again.

    A library imports what it can do without if it is there, for features that a process may not have. A module that is imported
    already stays.
    """
    absent = [name for name in names if name not in sys.modules]
    for name in absent:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name, None)  # an import that failed may have removed it
