"""The sinks that `[tracking]` names, as their processes take them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from job.tracking.config import Destinations, TrackingConfig
from job.tracking.sink_process import SinkSpec
from transport.errors import UserError

SINKS = {
    "tensorboard": ("job.tracking.sinks.tensorboard:TensorboardSink", "tensorboardX"),
    "trackio": ("job.tracking.sinks.trackio:TrackioSink", "trackio"),
    "wandb": ("job.tracking.sinks.wandb:WandbSink", "wandb"),
}
"""Each sink's class, and the package that it needs."""


def check_extras(given: Destinations) -> None:
    """Raises `UserError` if a package is missing."""
    for name, (_, package) in SINKS.items():
        if getattr(given.tracking, name, None) is not None and find_spec(package) is None:
            raise UserError(f"[tracking.{name}] needs the extra `{name}`: pip install 'counterpoint[{name}]'")
    if given.tracing is not None and find_spec("opentelemetry.exporter") is None:
        raise UserError("[tracing] needs the extra `otel`: pip install 'counterpoint[otel]'")


def sinks_of(given: Destinations, directory: Path) -> list[SinkSpec]:
    """Returns the sinks of a job's directory, and what exports its traces."""
    job, tracking = directory.absolute(), given.tracking or TrackingConfig()
    group = tracking.name or job.name
    tables: dict[str, dict[str, Any]] = {
        name: table.model_dump(mode="json") for name in SINKS if (table := getattr(tracking, name)) is not None
    }
    sinks = [SinkSpec(name, SINKS[name][0], str(job), group, options) for name, options in tables.items()]
    if given.tracing is not None:
        options = given.tracing.model_dump(mode="json")
        sinks.append(SinkSpec("otel", "", str(job), group, options, program="job.tracing.export_process"))
    return sinks
