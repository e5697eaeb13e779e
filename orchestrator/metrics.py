"""Publishes a step's metrics: one line of `metrics.jsonl`, Prometheus on loopback, and one line of the log.

The line is also in the step's checkpoint, which is the commit. `repair` makes the file agree with the checkpoint of a resume.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from orchestrator.loop_health.slow_spots import slow_spots_of
from orchestrator.rollouts.failures import PREFIX, failures_in_words, sum_failures
from orchestrator.run_directory import ConfigurationError
from orchestrator.step.environment_metrics import split_name
from transport.files.json_lines import lines_from_end, replace_end
from transport.process.permanent_errors import is_permanent

logger = logging.getLogger(__name__)

MetricsLine = dict[str, Any]
"""Metric name to number; `step` is always present."""


def repair(path: Path, newest_step: int, committed: Iterable[MetricsLine]) -> None:
    """Makes the file hold each step up to `newest_step` once.

    Removes later and torn lines, and adds missing ones from `committed`. Reads the file backwards to the first line of a step
    before those of `committed`: earlier lines were on the disk before these were committed. Raises `OSError`; the checkpoints
    then still have the lines of `committed`.
    """
    restored = {line["step"]: line for line in committed if line["step"] <= newest_step}
    first = min(restored, default=newest_step)
    lines = {step: orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for step, line in restored.items()}
    before, found = 0, b""
    start = 0
    for start, raw, line in lines_from_end(path):
        step = line.get("step") if line is not None else None
        if isinstance(step, int) and step < first:
            before, start = step, start + len(raw)
            break
        if isinstance(step, int) and step <= newest_step:
            lines[step] = raw  # of several lines of a step, the first one written is read last
        found = raw + found
    missing = [step for step in range(before + 1, newest_step + 1) if step not in lines]
    if missing:
        logger.warning("%s: the lines of steps %s are lost; no checkpoint kept holds them", path, missing)
    after = b"".join(lines[step] for step in sorted(lines))
    if after != found:
        replace_end(path, start, after)


def log_step(line: Mapping[str, Any], total_steps: int) -> None:
    """Logs a step in one line: its reward and rollouts, the lag, and its phases, the longest first."""
    phases = {name.removeprefix("phase/"): value for name, value in line.items() if name.startswith("phase/")}
    ordered = sorted(phases.items(), key=lambda item: -item[1])
    logger.info(
        "step %d/%d  reward %.3f  staleness %.2f  rollouts %d (%d failed, %d filtered, %d cancelled)  policy %d  "
        "lag p99 %.1f ms max %.1f ms  phases: %s%s%s",
        line["step"], total_steps, line["reward/mean"], line["staleness/mean"],
        line["rollouts/completed"], line["rollouts/failed"], line["rollouts/filtered"], line["rollouts/cancelled"],
        line["policy/version"], line["event_loop_lag/p99"] * 1e3, line["event_loop_lag/max"] * 1e3,
        ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in ordered), _blame(line), _failures(line),
    )  # fmt: skip


def _failures(line: Mapping[str, Any]) -> str:
    words = failures_in_words(sum_failures([line]))
    unanswered = line.get("rollouts/inference_failed", 0)
    return (f"  failed: {words}" if words else "") + (
        f"  without an answer from inference: {unanswered}" if unanswered else ""
    )


def _blame(line: Mapping[str, Any]) -> str:
    slow_spots = slow_spots_of([line])
    worst = slow_spots.worst(1)
    return f"  late {slow_spots.moments} times, most: {worst[0].seconds:.3f} s {worst[0]}" if worst else ""


class PrometheusEndpoint(Collector):
    """Serves the newest line on loopback as gauges named `counterpoint_<metric>`, labelled with the run.

    A context manager. On entry, raises `OSError` when the port is taken, `ConfigurationError` when it can never be used.
    """

    def __init__(self, port: int, run_id: str) -> None:
        self._port = port
        self._run_id = run_id
        self._line: MetricsLine = {}
        self._lasting: MetricsLine = {}

    def publish(self, line: MetricsLine) -> None:
        """Replaces the line that is served."""
        self._line = line

    def publish_lasting(self, values: Mapping[str, Any]) -> None:
        """Adds values that are served, beside each line, until others replace them."""
        self._lasting = self._lasting | dict(values)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yields the gauges. The HTTP thread calls it at each scrape."""
        failures = sum_failures([self._line])
        if failures:
            gauge = GaugeMetricFamily(
                "counterpoint_failures", "failed rollouts", labels=["run", "environment", "error"]
            )
            for environment, kinds in failures.items():
                for kind, count in kinds.items():
                    gauge.add_metric([self._run_id, environment, kind], count)
            yield gauge
        # One gauge with labels: two names of an environment could become one name of Prometheus.
        means = GaugeMetricFamily(
            "counterpoint_environment_mean", "metrics of rollouts", labels=["run", "environment", "metric"]
        )
        for name, value in (self._line | self._lasting).items():
            if (split := split_name(name)) is not None:
                means.add_metric([self._run_id, *split], value)
            elif isinstance(value, int | float) and not name.startswith(PREFIX):
                gauge = GaugeMetricFamily(f"counterpoint_{re.sub(r'[^A-Za-z0-9_]', '_', name)}", name, labels=["run"])
                gauge.add_metric([self._run_id], value)
                yield gauge
        if means.samples:
            yield means

    def __enter__(self) -> PrometheusEndpoint:
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(self._port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            message = (
                f"prometheus_port = {self._port}: cannot listen on 127.0.0.1:{self._port}: {error.strerror}. "
                "Choose another port, or 0 for any free one"
            )
            if is_permanent(error):
                raise ConfigurationError(message) from error
            raise OSError(error.errno, message) from error
        self.port = int(self._server.server_port)
        logger.info("Prometheus metrics at http://127.0.0.1:%d/metrics", self.port)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # `shutdown` waits up to half a second for the serving thread's next poll, so it has a thread of its own.
        threading.Thread(target=self._close, name="prometheus-close").start()

    def _close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
