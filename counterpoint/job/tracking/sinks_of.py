"""The sinks that `[tracking]` names, as their processes take them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from counterpoint.job.tracking.alerts import address_of, read_headers
from counterpoint.job.tracking.config import Destinations, TrackingConfig
from counterpoint.job.tracking.sink_process import SinkSpec
from counterpoint.transport.errors import UserError

SINKS = {
    "tensorboard": ("counterpoint.job.tracking.sinks.tensorboard:TensorboardSink", "tensorboardX"),
    "trackio": ("counterpoint.job.tracking.sinks.trackio:TrackioSink", "trackio"),
    "wandb": ("counterpoint.job.tracking.sinks.wandb:WandbSink", "wandb"),
}
"""Each sink's class, and the package that it needs."""


def check_extras(given: Destinations) -> None:
    """Raises `UserError` if a package is missing, or a file that says where alerts go."""
    for name, (_, package) in SINKS.items():
        if getattr(given.tracking, name, None) is not None and find_spec(package) is None:
            raise UserError(f"[tracking.{name}] needs the extra `{name}`: pip install 'counterpoint[{name}]'")
    if given.tracing is not None and find_spec("opentelemetry.exporter") is None:
        raise UserError("[tracing] needs the extra `otel`: pip install 'counterpoint[otel]'")
    if given.alerts is not None:
        try:
            address_of(given.alerts.url, given.alerts.url_file)
            read_headers(None if given.alerts.headers_file is None else str(given.alerts.headers_file))
        except (OSError, ValueError) as error:
            raise UserError(f"[alerts]: {error}") from None


def sinks_of(given: Destinations, directory: Path, lives: bool = True) -> list[SinkSpec]:
    """Returns the sinks of a job's directory, what exports its traces, and, of a job that `lives`, what sends its alerts."""
    job, tracking = directory.absolute(), given.tracking or TrackingConfig()
    group = tracking.name or job.name
    tables: dict[str, dict[str, Any]] = {
        name: table.model_dump(mode="json") for name in SINKS if (table := getattr(tracking, name)) is not None
    }
    sinks = [SinkSpec(name, SINKS[name][0], str(job), group, options) for name, options in tables.items()]
    if given.tracing is not None:
        options = given.tracing.model_dump(mode="json")
        sinks.append(SinkSpec("otel", "", str(job), group, options, program="counterpoint.job.tracing.export_process"))
    if given.alerts is not None and lives:
        options = given.alerts.model_dump(mode="json")
        sinks.append(
            SinkSpec(
                "alerts", "", str(job), group, options, program="counterpoint.serve.alerting.process", poll_seconds=5.0
            )
        )
    return sinks
