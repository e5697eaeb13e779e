"""`JobTelemetry`: what the supervisor of a job shows to Prometheus, and the tables of its metrics.

The supervisor replaces the views of its workers as a whole; a scrape reads the last ones, in its own thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from counterpoint.cluster.worker_view import ENDED, State, WorkerView
from counterpoint.transport.telemetry.endpoint import MetricsEndpoint, as_user_error
from counterpoint.transport.telemetry.metric import Metric, Process
from counterpoint.transport.telemetry.values import Labels

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


class JobTelemetry:
    """The endpoint of a supervisor: a context manager. On entry, raises `UserError` if the port cannot be had."""

    def __init__(self, host: str, port: int, directory: Path) -> None:
        self._directory = directory
        self._endpoint = MetricsEndpoint(port, SUPERVISOR, host=host)
        self._endpoint.values.on_scrape(self._read)
        self._shown: tuple[State, Sequence[WorkerView], Mapping[str, float], int] | None = None

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._endpoint.port

    def show(self, job: State, workers: Sequence[WorkerView], heard: Mapping[str, float], runs: int) -> None:
        """Takes the present views, which nobody changes, and when each worker was heard, by the monotonic clock."""
        self._shown = (job, workers, heard, runs)

    def __enter__(self) -> JobTelemetry:
        try:
            self._endpoint.__enter__()
        except OSError as error:
            raise as_user_error(error) from None
        self._endpoint.write_target(self._directory)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._endpoint.__exit__(kind, error, trace)

    def _read(self) -> Iterator[tuple[Metric, Labels, float]]:
        if self._shown is None:
            return
        job, workers, heard, runs = self._shown
        states, now = Counter(dict.fromkeys(State, 0)), time.monotonic()
        states.update(worker.state for worker in workers)
        yield GUESTS, (), runs
        for state in State:
            yield JOB_STATE, (state.value,), float(state is job)
            yield WORKERS, (state.value,), states[state]
        for worker in workers:
            yield WORKER_STATE, (worker.name, worker.state.value), 1
            yield WORKER_SINCE, (worker.name,), worker.since
            yield RESTARTS, (worker.name,), worker.restarts
            if worker.name in heard and worker.state not in ENDED:
                yield HEARTBEAT_AGE, (worker.name,), max(0.0, now - heard[worker.name])
