"""`RunTelemetry`: the orchestrator's endpoint for Prometheus (`orchestrator/telemetry/catalogue.py`).

The values of a step come from its metrics line. Once a second the loop also notes the state of its servers and rollouts. A
scrape reads that note, and touches none of the loop's objects.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

from counterpoint.inference.pool import meters as of_pool
from counterpoint.inference.pool.meters import PoolMeters
from counterpoint.inference.pool.pool import Served
from counterpoint.orchestrator.activity import MAX_OUTAGES
from counterpoint.orchestrator.run_directory import ConfigurationError
from counterpoint.orchestrator.scheduling.scheduler import RolloutScheduler
from counterpoint.orchestrator.telemetry import catalogue
from counterpoint.run.config import RunConfig
from counterpoint.run.loop_health.lag import LAG, EventLoopLagMonitor
from counterpoint.transport.outages import Outages
from counterpoint.transport.process.permanent_errors import is_permanent
from counterpoint.transport.telemetry.endpoint import MetricsEndpoint
from counterpoint.transport.telemetry.lines import LineReader
from counterpoint.transport.telemetry.metric import Metric
from counterpoint.transport.telemetry.values import Labels

NOTE_SECONDS = 1.0
"""Seconds between two notes of the servers and the rollouts in flight."""

SERVER_STATES = ("unknown", "loading", "serving", "draining", "out")


class RunTelemetry:
    """The endpoint of a run: a context manager.

    On entry, raises `OSError` when the port is taken, `ConfigurationError` when it can never be used.
    """

    def __init__(self, config: RunConfig, lag: EventLoopLagMonitor) -> None:
        self._config = config
        self._endpoint = MetricsEndpoint(
            config.prometheus_port, catalogue.ORCHESTRATOR, {"run": config.run_id}, host=config.prometheus_host
        )
        self._values = self._endpoint.values
        self._values.attach(LAG, lag.histogram)
        self._values.set(catalogue.STEPS_PLANNED, config.steps)
        self._lines = LineReader(self._values, catalogue.LINES)
        self._noted: float | None = None
        """The time of the loop's last note, on the monotonic clock, or None while it makes none."""

    @property
    def port(self) -> int:
        """The port of the endpoint."""
        return self._endpoint.port

    def publish(self, line: Mapping[str, Any]) -> None:
        """Shows a step's metrics line."""
        results = {name: value for name, value in line.items() if name.startswith("evaluation/")}
        self._lines.take({name: value for name, value in line.items() if name not in results}, "step")
        self.publish_lasting(results)

    def publish_lasting(self, values: Mapping[str, Any]) -> None:
        """Shows results of evaluations until others replace them."""
        self._lines.take(values, "evaluations", lasting=True)

    async def watch(self, pool: Served, scheduler: RolloutScheduler, outages: Outages) -> None:
        """Notes the state of servers and rollouts, until cancelled."""
        meters = pool.meters
        self._values.attach(of_pool.TURN_SECONDS, meters.turn_seconds)
        self._values.attach(of_pool.UPDATE_SECONDS, meters.update_seconds)
        self._values.on_scrape(lambda: _counted(meters))
        self._values.on_scrape(self._silence)
        try:
            while True:
                self._noted = time.monotonic()
                self._values.replace("now", _now(pool, scheduler) | _of(outages))
                await asyncio.sleep(NOTE_SECONDS)
        finally:
            self._noted = None

    def _silence(self) -> list[tuple[Metric, Labels, float]]:
        noted = self._noted
        return [] if noted is None else [(catalogue.SILENT, (), time.monotonic() - noted)]

    def __enter__(self) -> RunTelemetry:
        try:
            self._endpoint.__enter__()
        except OSError as error:
            if is_permanent(error):
                raise ConfigurationError(error.strerror) from error
            raise
        # Its own directory it can write to, whoever has made the job's.
        own = self._config.run_dir / "control" / "endpoint.json"
        self._endpoint.write_target(self._config.output_dir, f"orchestrator_{self._config.run_id}", own)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._endpoint.__exit__(kind, error, trace)


def _counted(meters: PoolMeters) -> Iterable[tuple[Metric, Labels, float]]:
    yield of_pool.RETRIES, (), meters.retries
    yield of_pool.UNANSWERED, (), meters.unanswered


def _of(outages: Outages) -> dict[tuple[Metric, Labels], float]:
    return {
        (catalogue.OUTAGE_START, (outage.kind, outage.who)): outage.since for outage in outages.current()[:MAX_OUTAGES]
    }


def _now(pool: Served, scheduler: RolloutScheduler) -> dict[tuple[Metric, Labels], float]:
    """Returns the present state of servers and rollouts."""
    servers, snapshot = pool.status(), scheduler.snapshot()
    states = Counter(dict.fromkeys(SERVER_STATES, 0))
    states.update(server.state for server in servers)
    return {
        **{(of_pool.SERVERS, (state,)): number for state, number in states.items()},
        **{(of_pool.SERVER_VERSION, (each.url,)): each.version for each in servers if each.version is not None},
        **{(of_pool.SERVER_REQUESTS, (each.url,)): each.in_flight for each in servers},
        (of_pool.CAPACITY, ()): snapshot.capacity,
        (of_pool.QUEUE, ()): pool.waiting_requests,
        (catalogue.PAUSED, ()): int(snapshot.paused),
        (catalogue.IN_FLIGHT, ("training",)): snapshot.in_flight_rollouts,
        (catalogue.IN_FLIGHT, ("evaluation",)): snapshot.evaluation_rollouts,
    }
