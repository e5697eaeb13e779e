"""What a process that runs a master adds to it: it sees every change, and knows the job's guests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cluster.backends.base import Heartbeat
from cluster.manager.manager import PrimeManager


class Observer:
    """Sees nothing, and knows of no guests. An exception of an observer ends its master's term: catch your own."""

    def changed(
        self, manager: PrimeManager, beats: Mapping[str, Heartbeat], silent_for: Callable[[str], float]
    ) -> None:
        """Called on the loop after events, before what follows from them is done; and after each heartbeat.

        `beats` are the last heartbeats; `silent_for` returns how many seconds ago a worker's last one was.
        """

    async def guests(self) -> Sequence[str] | None:
        """Returns the job's guests; None if they are not known.

        Awaited by the loop about twice a second, and before the end of a worker is handled: the services go on for a guest that
        came before the last task ended.
        """
        return None
