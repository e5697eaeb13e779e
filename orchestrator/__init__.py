"""The daemon: one process, one uvloop loop, from examples to batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterpoint.public_names import public_names

if TYPE_CHECKING:
    from counterpoint.run.config import LagConfig as LagConfig
    from counterpoint.run.loop_health.lag import EventLoopLagMonitor as EventLoopLagMonitor
    from counterpoint.run.loop_health.lag import LagDistribution as LagDistribution
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
