"""Limits the adapters with requests in the engine to its slots, and shares the slots among all adapters in turn.

vLLM admits a request of an adapter that already runs before one of an adapter without a slot. With more adapters than slots
and a steady load, the running ones would never free their slots, and the others' requests would wait until they time out. So
while adapters wait, one that has had its slot for long enough gets no new request in: its requests end, and its slot goes to
the adapter that waits longest. This file does not import vLLM.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

SLOT_SECONDS = 5.0
"""How long an adapter keeps its slot while others wait: long compared with the change, in which the slot empties."""


@dataclass(slots=True)
class _Use:
    """The use of a slot by an adapter."""

    began: float
    requests: int


class AdapterSlots:
    """Shares `slots` among any number of adapters."""

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._slots = slots
        self._clock = clock
        self._used: dict[str, _Use] = {}
        """The use of each adapter with a slot, the oldest first."""
        self._queues: dict[str, list[asyncio.Future[None]]] = {}
        """Requests that wait, by adapter, the adapter that waits longest first."""

    @asynccontextmanager
    async def use(self, adapter: str) -> AsyncIterator[None]:
        """Waits until a request of `adapter` may run, and counts it while it runs."""
        await self._enter(adapter)
        try:
            yield
        finally:
            self._leave(adapter)

    async def _enter(self, adapter: str) -> None:
        use = self._used.get(adapter)
        if use is not None and not self._is_over(adapter):
            use.requests += 1
            return
        place = asyncio.get_running_loop().create_future()
        self._queues.setdefault(adapter, []).append(place)
        self._fill_slots()
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():
                self._leave(adapter)
            raise

    def _is_over(self, adapter: str) -> bool:
        """Whether the adapter must give up its slot to one that waits.

        It must if no more adapters have had their slot for longer than others wait, and it has had its own for
        `SLOT_SECONDS`.
        """
        waiting = sum(
            other not in self._used and not all(place.cancelled() for place in queue)
            for other, queue in self._queues.items()
        )
        due = list(self._used)[:waiting]
        return adapter in due and self._clock() - self._used[adapter].began >= SLOT_SECONDS

    def _leave(self, adapter: str) -> None:
        use = self._used[adapter]
        use.requests -= 1
        if not use.requests:
            del self._used[adapter]
            self._fill_slots()

    def _fill_slots(self) -> None:
        while len(self._used) < self._slots:
            adapter = next((name for name in self._queues if name not in self._used), None)
            if adapter is None:
                return
            places = [place for place in self._queues.pop(adapter) if not place.cancelled()]
            if places:
                self._used[adapter] = _Use(self._clock(), len(places))
            for place in places:
                place.set_result(None)
