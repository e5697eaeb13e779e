"""The supervisor of a job, `counterpoint run`: its workers as `counterpoint status` shows them."""

from __future__ import annotations

from transport.telemetry.metric import Metric, Process

JOB_STATE = Metric(
    "counterpoint_job_state", "gauge", "1 for the state that the job is in, 0 for the others", labels=("state",)
)
WORKERS = Metric("counterpoint_job_workers", "gauge", "workers of the job by state", labels=("state",))
WORKER_STATE = Metric(
    "counterpoint_worker_state", "gauge", "1: the worker is in this state", labels=("worker", "state"), most_series=1024
)
WORKER_SINCE = Metric(
    "counterpoint_worker_state_timestamp_seconds",
    "gauge",
    "Unix time since which a worker is in its state",
    "seconds",
    ("worker",),
    most_series=1024,
)
RESTARTS = Metric(
    "counterpoint_worker_restarts", "counter", "restarts of a worker", labels=("worker",), most_series=1024
)
HEARTBEAT_AGE = Metric(
    "counterpoint_worker_heartbeat_age_seconds",
    "gauge",
    "time since the last heartbeat of a worker that lives",
    "seconds",
    ("worker",),
    most_series=1024,
)
GUESTS = Metric("counterpoint_job_runs", "gauge", "runs that the job knows of, guests included")

SUPERVISOR = Process(
    "supervisor",
    "Supervisor",
    "`counterpoint run`. Its port is `prometheus_port` at the top of the job's file.",
    {},
    (JOB_STATE, WORKERS, WORKER_STATE, WORKER_SINCE, RESTARTS, HEARTBEAT_AGE, GUESTS),
)
