"""`WorkerTelemetry`: what a worker of a sweep shows to Prometheus, and the tables of its metrics.

Its own claims it counts. How all targets are is read from the storage when somebody scrapes, in the thread of the scrape.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from counterpoint.job.sweep.targets import SweepConfig, Target
from counterpoint.sweep.status import TargetStatus, sweep_status
from counterpoint.transport.telemetry.endpoint import TARGETS as TARGET_FILES
from counterpoint.transport.telemetry.endpoint import MetricsEndpoint, as_user_error
from counterpoint.transport.telemetry.metric import LONG_SECONDS, Metric, Process
from counterpoint.transport.telemetry.values import Labels

logger = logging.getLogger(__name__)

TARGETS = Metric(
    "counterpoint_sweep_targets", "gauge", "targets of the whole sweep by state, as stored", labels=("state",)
)
ATTEMPTS = Metric("counterpoint_sweep_attempts", "gauge", "attempts at all targets, by all workers, as stored")
OLDEST_HEARTBEAT = Metric(
    "counterpoint_sweep_heartbeat_age_max_seconds",
    "gauge",
    "time since the oldest last heartbeat among running targets, if the clocks agree",
    "seconds",
)
STORE_UP = Metric("counterpoint_sweep_storage_up", "gauge", "1 if the storage could be read last, else 0")
CLAIMS = Metric("counterpoint_sweep_claims", "counter", "targets that this worker has claimed")
ENDED = Metric(
    "counterpoint_sweep_claims_ended",
    "counter",
    "claims of this worker that ended: success, failed, or interrupted (given back, or its lease was lost)",
    labels=("outcome",),
)
TARGET_SECONDS = Metric(
    "counterpoint_sweep_target_seconds",
    "histogram",
    "time of this worker's claims, from claim to end",
    "seconds",
    buckets=(*LONG_SECONDS, 3600.0, 14400.0, 86400.0),
)

SWEEP = Process(
    "sweep",
    "Sweep",
    "Each worker of a sweep. Its port is `prometheus_port` of the sweep's file. A scrape reads the storage, at most twice a "
    "minute. Its discovery file is with the job that the targets join, or else beside the directories of the targets.",
    {"sweep": "its name"},
    (TARGETS, ATTEMPTS, OLDEST_HEARTBEAT, STORE_UP, CLAIMS, ENDED, TARGET_SECONDS),
)

STATES = ("PENDING", "RUNNING", "SUCCESS", "FAILED", "INTERRUPTED", "UNREADABLE")

READ_SECONDS = 30.0
"""Seconds between two readings of the storage."""

SHARE_OF_READING = 0.05
"""The largest share of the time that is spent on reading: storage in a cloud may take seconds for many targets."""


class WorkerTelemetry:
    """The endpoint of a worker: a context manager. On entry, raises `UserError` if the port cannot be had."""

    def __init__(self, config: SweepConfig, targets: Sequence[Target]) -> None:
        self._config = config
        self._ids = [target.target_id for target in targets]
        self._directory = config.join or targets[0].output_dir.parent
        self._endpoint = MetricsEndpoint(config.prometheus_port, SWEEP, {"sweep": config.name})
        self._endpoint.values.on_scrape(self._read)
        self._reading = threading.Lock()
        self._statuses: list[TargetStatus] | None = None
        self._read_again = 0.0

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._endpoint.port

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Counts a claim and how it ends, with the block."""
        values, began, outcome = self._endpoint.values, time.monotonic(), "failed"
        values.add(CLAIMS, 1)
        try:
            yield
            outcome = "success"
        except asyncio.CancelledError:
            outcome = "interrupted"
            raise
        finally:
            values.add(ENDED, 1, outcome)
            values.histogram(TARGET_SECONDS).observe(time.monotonic() - began)

    def __enter__(self) -> WorkerTelemetry:
        try:
            self._endpoint.__enter__()
        except OSError as error:
            raise as_user_error(error) from None
        prefix = f"sweep_{self._config.name}_{socket.gethostname()}_"
        _remove_ended(self._directory / TARGET_FILES, prefix)
        self._endpoint.write_target(self._directory, f"{prefix}{os.getpid()}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._endpoint.__exit__(kind, error, trace)

    def _read(self) -> Iterator[tuple[Metric, Labels, float]]:
        with self._reading:  # of scrapes alone
            if time.monotonic() >= self._read_again:
                self._read_storage()
            statuses = self._statuses
        yield STORE_UP, (), float(statuses is not None)
        if statuses is None:
            return
        states = Counter(dict.fromkeys(STATES, 0))
        states.update(status.state for status in statuses)
        for state, number in states.items():
            yield TARGETS, (state,), number
        yield ATTEMPTS, (), sum(status.attempts for status in statuses)
        beats = [each.heartbeat_at for each in statuses if each.state == "RUNNING" and each.heartbeat_at is not None]
        yield OLDEST_HEARTBEAT, (), max((time.time() - beat for beat in beats), default=0.0)

    def _read_storage(self) -> None:
        began = time.monotonic()
        try:
            self._statuses = sweep_status(self._config.store, self._ids)
        except (OSError, ValueError) as error:  # `StoreError` among them
            logger.debug("the storage cannot be read for a scrape: %s", error)
            self._statuses = None
        now = time.monotonic()
        self._read_again = now + max(READ_SECONDS, (now - began) / SHARE_OF_READING)


def _remove_ended(directory: Path, prefix: str) -> None:
    """Removes what killed workers of this machine have left: each worker has a name of its own, so they would add up."""
    for path in directory.glob(f"{prefix}*.json"):
        number = path.stem.removeprefix(prefix)
        if number.isdecimal() and not _lives(int(number)):
            with suppress(OSError):
                path.unlink()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
