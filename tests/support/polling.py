"""Waiting for a condition that nothing announces: polled, with a deadline, and named in the failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

DEADLINE_SECONDS = 300.0
"""Long enough for a machine so busy that a process takes two minutes to start. A test whose condition never holds takes this long
to fail, below the limit of a whole test (pyproject.toml)."""

INTERVAL_SECONDS = 0.005
LONGEST_INTERVAL_SECONDS = 0.025
"""After a second. What takes long to begin is no shorter itself, and a look at it may cost milliseconds."""


def wait_until(
    condition: Callable[[], bool],
    what: str,
    seconds: float = DEADLINE_SECONDS,
    details: Callable[[], str] = lambda: "",
) -> None:
    """Blocks this thread until `condition()` holds. Raises `AssertionError` naming `what` after `seconds`, with `details()`."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < seconds, f"waited {seconds:g} s in vain for {what}\n{details()}".rstrip()
        time.sleep(_interval(waited))


async def until(condition: Callable[[], bool], what: str, seconds: float = DEADLINE_SECONDS) -> None:
    """Waits likewise, while the event loop runs."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < seconds, f"waited {seconds:g} s in vain for {what}"
        await asyncio.sleep(_interval(waited))


def _interval(waited: float) -> float:
    return INTERVAL_SECONDS if waited < 1.0 else LONGEST_INTERVAL_SECONDS
