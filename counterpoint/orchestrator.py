"""What measures the event loop of an orchestrator, for a daemon of your own (docs/debugging.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.public_names import public_names

if TYPE_CHECKING:
    from orchestrator.loop_health.lag import EventLoopLagMonitor as EventLoopLagMonitor
    from orchestrator.loop_health.lag import LagDistribution as LagDistribution
    from run.config import LagConfig as LagConfig
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
