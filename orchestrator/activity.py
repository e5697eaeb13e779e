"""Publishes a run's activity beside its metrics: spans of its steps, the state of its servers, and outages.

The loop collects them at the end of a step and about once a second, and a thread writes them. A disk that is full or slow costs
only these lines. `docs/contracts.md` has the formats.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import orjson

from counterpoint.orchestrator.scheduling.events import PolicyUpdated, PolicyUpdateStarting
from counterpoint.run.loop_health.threads import in_thread
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.outages import Outages
from counterpoint.transport.telemetry.intervals import Interval
from counterpoint.transport.telemetry.spans import SPANS_FILE, Span, SpanLog, now, unix_time

logger = logging.getLogger(__name__)

FLEET_FILE = "fleet.json"
"""File in the run's directory."""

PUBLISH_SECONDS = 1.0

MAX_OUTAGES = 256
"""Outages in `fleet.json`, the oldest."""

RATE_SECONDS = 30.0
"""Seconds over which `fleet.json` averages its rates: an answer brings all its tokens at once."""

_STEP_ATTRIBUTES = {
    "rollouts/completed": "rollouts",
    "batch/samples": "samples",
    "batch/tokens": "tokens",
    "policy/version": "policy_version",
}


class _PublishedServers(Protocol):
    """The part of `inference.pool.pool.Served` that is published."""

    def take_spans(self, run: str, step: int) -> list[Span]:
        """Returns the servers' spans since the last call."""

    def fleet(self) -> dict[str, Any]:
        """Returns state and totals of the servers."""


class RunActivity:
    """The activity of one run. Call all of it on the event loop."""

    def __init__(self, run_dir: Path, run_id: str, outages: Outages | None = None) -> None:
        """Publishes `outages`, and reminds the log of them."""
        self._outages = Outages() if outages is None else outages
        self.spans = SpanLog(run_dir / SPANS_FILE, "orchestrator", run_id)
        self._run_id = run_id
        self._path = run_dir / FLEET_FILE
        self._servers: _PublishedServers | None = None
        self._rates = Rates()
        self._step = 0
        self._loading_since = 0.0
        self._lock = threading.Lock()
        """Held while a thread writes."""
        self._ended = False
        self._is_failing = False

    def observe(self, servers: _PublishedServers, step: int) -> None:
        """Publishes these servers' state from now on. `step` is the newest committed one."""
        self._servers, self._step = servers, step

    def policy(self, event: PolicyUpdateStarting | PolicyUpdated) -> None:
        """Notes that weights begin to load, or serve."""
        if isinstance(event, PolicyUpdateStarting):
            self._loading_since = now()
        else:
            self.spans.record("load_weights", self._loading_since, now(), step=event.version, version=event.version)

    def end_step(self, line: Mapping[str, Any], phases: Mapping[str, Sequence[Interval]]) -> None:
        """Adds the spans of a committed step. `phases` are those of `step.phases.PhaseClock`, by their names."""
        step = self._step = line["step"]
        whole = [interval for intervals in phases.values() for interval in intervals]
        if whole:
            begin, end = min(each.begin for each in whole), max(each.end for each in whole)
            attributes = {name: line[key] for key, name in _STEP_ATTRIBUTES.items() if key in line}
            self.spans.record("step", unix_time(begin), unix_time(end), step=step, **attributes)
        for phase, intervals in phases.items():
            at = (Interval(unix_time(each.begin), unix_time(each.end), each.busy) for each in intervals)
            self.spans.record_intervals(phase, at, step=step)
        if self._servers is not None:
            for span in self._servers.take_spans(self._run_id, step):
                self.spans.add(span)

    async def run(self) -> None:
        """Writes all that is new, again and again, until cancelled."""
        while True:
            await asyncio.sleep(PUBLISH_SECONDS)
            self._outages.remind()
            await in_thread(self._write, self._fleet())

    async def close(self) -> None:
        """Writes all that is new for the last time."""
        await in_thread(self._write, self._fleet(), ended=True)

    def _fleet(self) -> dict[str, Any] | None:
        if self._servers is None:
            return None
        fleet = self._servers.fleet()
        self._rates.add_to(fleet["servers"], time.monotonic())
        outages = [asdict(outage) for outage in self._outages.current()[:MAX_OUTAGES]]
        now = {"format": 1, "run": self._run_id, "time": time.time(), "step": self._step, "outages": outages}
        return now | fleet

    def _write(self, fleet: dict[str, Any] | None, ended: bool = False) -> None:
        self.spans.flush()
        with self._lock:
            if fleet is None or self._ended:  # the last but one may come after the last
                return
            self._ended = ended
            try:
                write_atomically(self._path, orjson.dumps(fleet | {"ended": ended}), durable=False)
                self._is_failing = False
            except Exception:
                if not self._is_failing:
                    logger.warning("%s cannot be written; the run goes on without it", self._path, exc_info=True)
                self._is_failing = True


class Rates:
    """Rates of the servers' totals over the last `RATE_SECONDS`."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, dict[str, tuple[int, int, int, int]]]] = deque()

    def add_to(self, servers: Sequence[dict[str, Any]], at: float) -> None:
        """Adds to each server's totals the rates since the oldest totals seen, or None if there are none yet."""
        while len(self._seen) > 1 and at - self._seen[0][0] > RATE_SECONDS:
            self._seen.popleft()
        oldest_at, oldest = self._seen[0] if self._seen else (at, {})
        seconds = at - oldest_at
        newest = {}
        for server in servers:
            names = ("requests", "completion_tokens", "cached_tokens", "cacheable_tokens")
            totals = newest[server["url"]] = tuple(server[name] for name in names)
            before = oldest.get(server["url"])
            requests, tokens, cached, cacheable = (
                (0, 0, 0, 0) if before is None else (new - old for new, old in zip(totals, before, strict=True))
            )
            known = before is not None and seconds > 0
            server["requests_per_second"] = requests / seconds if known else None
            server["tokens_per_second"] = tokens / seconds if known else None
            server["cache_hit_share"] = cached / cacheable if cacheable else None
        self._seen.append((at, newest))
