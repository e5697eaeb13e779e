"""The sinks that `[tracking]` names."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from counterpoint.job.tracking.config import TrackingConfig
from counterpoint.job.tracking.rows import SinkSpec
from counterpoint.job.tracking.sinks.tensorboard import TensorboardSink
from counterpoint.job.tracking.sinks.trackio import TrackioSink
from counterpoint.job.tracking.sinks.wandb import WandbSink
from counterpoint.transport.errors import UserError

SINKS = {
    "tensorboard": (TensorboardSink, "tensorboardX"),
    "trackio": (TrackioSink, "trackio"),
    "wandb": (WandbSink, "wandb"),
}
"""Each sink's class, and the package that it needs, which only its instances import."""


def check_extras(tracking: TrackingConfig | None) -> None:
    """Raises `UserError` if a package is missing."""
    for name, (_, package) in SINKS.items():
        if getattr(tracking, name, None) is not None and find_spec(package) is None:
            raise UserError(f"[tracking.{name}] needs the extra `{name}`: pip install 'counterpoint[{name}]'")


def sinks_of(tracking: TrackingConfig, directory: Path) -> list[SinkSpec]:
    """Returns the sinks of a job's directory."""
    job = directory.absolute()
    return [
        SinkSpec(name, sink, job, tracking.name or job.name, table.model_dump(mode="json"))
        for name, (sink, _) in SINKS.items()
        if (table := getattr(tracking, name)) is not None
    ]
