"""`TrainerEndpoint`: what the trainer shows to Prometheus (`counterpoint/trainer/telemetry/catalogue.py`). Rank 0 alone has one.

The trainer's thread notes the values; a scrape reads them, and touches neither a run nor the GPU.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from types import TracebackType

import torch

from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.metrics import MetricValue
from counterpoint.trainer.model.compiler import compilations
from counterpoint.trainer.runs.record import RunStage
from counterpoint.trainer.runs.registry import RunRegistry
from counterpoint.trainer.telemetry import catalogue
from counterpoint.trainer.telemetry.published import Work
from counterpoint.transport.outages import Outages
from counterpoint.transport.telemetry.endpoint import MetricsEndpoint
from counterpoint.transport.telemetry.lines import LineReader
from counterpoint.transport.telemetry.metric import Metric
from counterpoint.transport.telemetry.values import Labels

NOTE_SECONDS = 1.0
"""Shortest time between two notes of the runs and the memory."""


class TrainerEndpoint:
    """The endpoint of a trainer: a context manager. Without being entered, it takes values and serves none."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._endpoint = MetricsEndpoint(config.prometheus_port, catalogue.TRAINER, host=config.prometheus_host)
        self._values = self._endpoint.values
        self._values.set(catalogue.SLOTS, config.max_runs)
        self._lines = LineReader(self._values, catalogue.LINES)
        self._noted = -NOTE_SECONDS

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._endpoint.port

    def publish(self, run_id: str, line: Mapping[str, MetricValue]) -> None:
        """Shows a step's metrics line."""
        self._lines.take(line, _group(run_id), {"run": run_id})

    def forget(self, run_id: str) -> None:
        """Drops what it shows of a run that has left its slot."""
        self._values.drop_group(_group(run_id))
        self._values.forget("run", run_id)

    def rows_trained(self, number: int) -> None:
        """Counts rows."""
        self._values.add(catalogue.ROWS, number)

    def note(self, registry: RunRegistry, outages: Outages, work: Work) -> None:
        """Notes the runs' stages, what waits, who is out, the memory and the compiler's work, if the last note is old."""
        now = time.monotonic()
        if now - self._noted < NOTE_SECONDS:
            return
        self._noted = now
        self._values.set(catalogue.LATE_GRAPHS, compilations.late)
        stages = Counter({stage.value: 0 for stage in RunStage})
        stages.update(record.stage.value for record in registry)
        occupied = registry.at(RunStage.ADMITTED, RunStage.TRAINING, RunStage.FINISHED)
        self._values.replace(
            "now",
            {
                **{(catalogue.RUNS, (stage,)): number for stage, number in stages.items()},
                **{(catalogue.WAITING, (run.run_id,)): work.get(run.slot, (None, 0))[1] for run in occupied},
                **{(catalogue.OUTAGE_START, (outage.kind, outage.who)): outage.since for outage in outages.current()},
                **_device_memory(),
            },
        )

    def __enter__(self) -> TrainerEndpoint:
        self._endpoint.__enter__()
        self._endpoint.write_target(self._config.output_dir)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._endpoint.__exit__(kind, error, trace)


def _group(run_id: str) -> str:
    return f"run {run_id}"


def _device_memory() -> dict[tuple[Metric, Labels], float]:
    """Returns torch's count, which asks no device and waits for none."""
    if not torch.cuda.is_initialized():
        return {}
    return {
        (catalogue.DEVICE_MEMORY, ("allocated",)): torch.cuda.memory_allocated(),
        (catalogue.DEVICE_MEMORY, ("peak",)): torch.cuda.max_memory_allocated(),
    }
