"""The metrics of a pool of servers, as its run sees it, and `PoolMeters`, which counts and times for them."""

from __future__ import annotations

from counterpoint.transport.telemetry.metric import LONG_SECONDS, Metric
from counterpoint.transport.telemetry.values import Histogram

SERVERS = Metric(
    "counterpoint_inference_servers",
    "gauge",
    "servers by state: unknown (never reached), loading (weights or their proof), serving, draining, out",
    labels=("state",),
)
SERVER_VERSION = Metric(
    "counterpoint_inference_server_version",
    "gauge",
    "policy version that a server has proven to hold",
    labels=("server",),
)
SERVER_REQUESTS = Metric(
    "counterpoint_inference_server_requests",
    "gauge",
    "requests of this run in flight at a server",
    labels=("server",),
)
CAPACITY = Metric("counterpoint_inference_capacity", "gauge", "requests that may be in flight at all servers together")
QUEUE = Metric("counterpoint_inference_waiting_requests", "gauge", "requests that wait for a server")
RETRIES = Metric("counterpoint_inference_retries", "counter", "requests that failed at a server and were tried again")
UNANSWERED = Metric("counterpoint_inference_unanswered_requests", "counter", "requests that got no answer in the end")
TURN_SECONDS = Metric(
    "counterpoint_turn_seconds",
    "histogram",
    "time from a rollout's request for a completion to its answer, waiting and retries included",
    "seconds",
    buckets=LONG_SECONDS,
)
UPDATE_SECONDS = Metric(
    "counterpoint_weight_update_seconds",
    "histogram",
    "time until every reachable server holds new weights and has proven it",
    "seconds",
    buckets=LONG_SECONDS,
)

METRICS = (
    SERVERS, SERVER_VERSION, SERVER_REQUESTS, CAPACITY, QUEUE, RETRIES, UNANSWERED, TURN_SECONDS, UPDATE_SECONDS,
)  # fmt: skip


class PoolMeters:
    """Counts since the pool began. The loop writes, and a scrape's thread reads."""

    def __init__(self) -> None:
        self.turn_seconds = Histogram(TURN_SECONDS.buckets)
        self.update_seconds = Histogram(UPDATE_SECONDS.buckets)
        self.retries = 0
        """Requests that failed at a server and were tried again."""
        self.unanswered = 0
        """Requests without an answer in the end."""
