"""What a process that runs a master adds to it: it sees every change, and knows the job's guests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from counterpoint.cluster.backends.base import Heartbeat
from counterpoint.cluster.manager.events import WorkerExited
from counterpoint.cluster.manager.manager import PrimeManager

logger = logging.getLogger(__name__)


class Observer:
    """Sees nothing, and knows of no guests. An exception of an observer ends its master's term: catch your own."""

    def changed(
        self,
        manager: PrimeManager,
        beats: Mapping[str, Heartbeat],
        exits: Mapping[str, WorkerExited],
        silent_for: Callable[[str], float],
    ) -> None:
        """Called on the loop after events, before what follows from them is done; and after each heartbeat.

        `beats` are the last heartbeats; `exits` are ends of processes that nothing was decided about yet, as while the state
        cannot be written; `silent_for` returns how many seconds ago a worker's last heartbeat was.
        """

    def troubled(self, trouble: str) -> None:
        """Called on the loop with the reason why the state cannot be written, once, and with "" when it can again."""
        if trouble:
            logger.error("%s; the workers go on", trouble)
        else:
            logger.warning("the job's state can be written again: the job goes on")

    async def guests(self) -> Sequence[str] | None:
        """Returns the job's guests; None if they are not known.

        Awaited by the loop about twice a second, and before the end of a worker is handled: the services go on for a guest that
        came before the last task ended.
        """
        return None
