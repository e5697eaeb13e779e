"""The sinks that `[tracking]` names, as their processes take them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from counterpoint.job.tracking.config import TrackingConfig
from counterpoint.job.tracking.sink_process import SinkSpec
from counterpoint.transport.errors import UserError

SINKS = {
    "tensorboard": ("counterpoint.job.tracking.sinks.tensorboard:TensorboardSink", "tensorboardX"),
    "trackio": ("counterpoint.job.tracking.sinks.trackio:TrackioSink", "trackio"),
    "wandb": ("counterpoint.job.tracking.sinks.wandb:WandbSink", "wandb"),
}
"""Each sink's class, and the package that it needs."""


def check_extras(tracking: TrackingConfig | None) -> None:
    """Raises `UserError` if a package is missing."""
    for name, (_, package) in SINKS.items():
        if getattr(tracking, name, None) is not None and find_spec(package) is None:
            raise UserError(f"[tracking.{name}] needs the extra `{name}`: pip install 'counterpoint[{name}]'")


def sinks_of(tracking: TrackingConfig, directory: Path) -> list[SinkSpec]:
    """Returns the sinks of a job's directory."""
    job = directory.absolute()
    tables: dict[str, dict[str, Any]] = {
        name: table.model_dump(mode="json") for name in SINKS if (table := getattr(tracking, name)) is not None
    }
    return [
        SinkSpec(name, SINKS[name][0], str(job), tracking.name or job.name, options) for name, options in tables.items()
    ]
