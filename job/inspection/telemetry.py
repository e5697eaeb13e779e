"""`JobTelemetry`: what the supervisor of a job shows to Prometheus (`transport/telemetry/catalogue/supervisor.py`).

The supervisor replaces the views of its workers as a whole; a scrape reads the last ones, in its own thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from cluster.worker_view import ENDED, State, WorkerView
from transport.telemetry.catalogue import supervisor as catalogue
from transport.telemetry.endpoint import Endpoint, as_user_error
from transport.telemetry.metric import Metric
from transport.telemetry.values import Labels


class JobTelemetry:
    """The endpoint of a supervisor: a context manager. On entry, raises `UserError` if the port cannot be had."""

    def __init__(self, host: str, port: int, directory: Path) -> None:
        self._directory = directory
        self._endpoint = Endpoint(port, catalogue.SUPERVISOR, host=host)
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
        yield catalogue.GUESTS, (), runs
        for state in State:
            yield catalogue.JOB_STATE, (state.value,), float(state is job)
            yield catalogue.WORKERS, (state.value,), states[state]
        for worker in workers:
            yield catalogue.WORKER_STATE, (worker.name, worker.state.value), 1
            yield catalogue.WORKER_SINCE, (worker.name,), worker.since
            yield catalogue.RESTARTS, (worker.name,), worker.restarts
            if worker.name in heard and worker.state not in ENDED:
                yield catalogue.HEARTBEAT_AGE, (worker.name,), max(0.0, now - heard[worker.name])
