"""All kinds of processes with an endpoint, in the order of the documentation."""

from __future__ import annotations

from transport.telemetry.catalogue import endpoint
from transport.telemetry.catalogue.orchestrator import ORCHESTRATOR
from transport.telemetry.catalogue.supervisor import SUPERVISOR
from transport.telemetry.catalogue.sweep import SWEEP
from transport.telemetry.catalogue.trainer import TRAINER
from transport.telemetry.catalogue.tune import TUNE
from transport.telemetry.metric import Metric, Process

EVERYWHERE = endpoint.METRICS

PROCESSES: tuple[Process, ...] = (ORCHESTRATOR, TRAINER, SUPERVISOR, SWEEP, TUNE)


def every_metric() -> list[Metric]:
    """Returns the metrics of all processes."""
    return [*(metric for process in PROCESSES for metric in process.metrics), *EVERYWHERE]
