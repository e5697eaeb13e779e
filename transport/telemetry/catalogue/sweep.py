"""A worker of a sweep: what it has claimed, and how all targets are by the sweep's storage."""

from __future__ import annotations

from transport.telemetry.metric import LONG_SECONDS, Metric, Process

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
