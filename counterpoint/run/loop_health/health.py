"""What a daemon measures of its event loop, and gives to it: lag, the code to blame for it, rollouts in flight, threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from counterpoint.run.config import LagConfig
from counterpoint.run.loop_health.blame import LoopBlame
from counterpoint.run.loop_health.gc_tuning import RolloutCounts
from counterpoint.run.loop_health.lag import EventLoopLagMonitor
from counterpoint.run.loop_health.threads import give_environments_threads
from counterpoint.transport.process.descriptors import allow_connections


class LoopMonitors:
    """The monitors of one loop. `on_tick` is called with every measurement of the lag."""

    def __init__(self, config: LagConfig, on_tick: Callable[[], None] | None = None) -> None:
        self.lag = EventLoopLagMonitor(config, on_tick)
        self.blame = LoopBlame(config.blame_seconds)
        self.rollout_counts = RolloutCounts()
        self._threads: ThreadPoolExecutor | None = None

    def make_room(self, rollouts: int) -> None:
        """Gives environments threads, and the process connections, for so many rollouts in flight. Call it on the loop."""
        former, self._threads = self._threads, give_environments_threads(rollouts)
        if former is not None:
            former.shutdown(wait=False)
        allow_connections(rollouts)

    def take_metrics(self) -> dict[str, Any]:
        """Returns the metrics of lag and blame since the last call.

        The maximum is that of both: a stall that begins while the lag's sampler sleeps is longer than the sampler sees.
        """
        late, lag = self.blame.take(), self.lag.take()
        return {**replace(lag, max=max(lag.max, late.longest)).metrics(), **late.metrics()}
