"""`[tracking]` of a job's file: the systems that get the job's metrics besides its own files. Each table turns one on.

`[tracing]`: a collector of OpenTelemetry that gets the job's traces.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from counterpoint.job.tracking.alerts import AlertsConfig
from counterpoint.transport.config import Config


class TensorboardConfig(Config):
    """TensorBoard's files (extra `tensorboard`)."""

    directory: Path | None = None
    """A folder for each run is made in it. Unset: `tracking/tensorboard` in the job's directory."""


class TrackioConfig(Config):
    """A database of Trackio on this machine (extra `trackio`)."""

    project: str = Field(default="counterpoint", min_length=1, max_length=100)
    """The project at Trackio."""

    directory: Path | None = None
    """Trackio's directory; `TRACKIO_DIR` of `trackio show`. Unset: `tracking/trackio` in the job's directory."""


class WandbConfig(Config):
    """Weights & Biases (extra `wandb`). The key comes from W&B's own environment or files, never from a job's file."""

    project: str = Field(default="counterpoint", min_length=1, max_length=100)
    """The project at W&B."""

    entity: str | None = None
    """The user or team. Unset: W&B's default."""

    mode: Literal["online", "offline"] = "online"
    """`offline` writes files below `tracking/wandb` in the job's directory, for `wandb sync`."""


class TracingConfig(Config):
    """Traces for a collector (extra `otel`), by OTLP over HTTP."""

    endpoint: str
    """The collector's address for traces: `http://127.0.0.1:4318/v1/traces`."""

    headers_file: Path | None = None
    """A file with a header for the collector a line, `Authorization: Bearer ...`, readable by its owner alone."""

    rollouts: float = Field(default=0.01, ge=0, le=1)
    """Share of the rollouts that are traced; every step is. `trace_rollouts` of a run overrides it."""

    @field_validator("endpoint")
    @classmethod
    def _is_address(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("expected an address such as http://127.0.0.1:4318/v1/traces")
        if parts.username is not None or parts.password is not None:
            raise ValueError("an address must not hold a password; put it into headers_file")
        return value


class TrackingConfig(Config):
    """Where metrics go besides the job's own files. A process of its own sends them, so that nothing waits for it."""

    name: str | None = Field(default=None, min_length=1, max_length=100)
    """The job's name there; its runs are grouped under it. Unset: the name of the job's directory."""

    tensorboard: TensorboardConfig | None = None
    """Whether, and where, TensorBoard's files are written."""

    trackio: TrackioConfig | None = None
    """Whether, and how, metrics go to Trackio's local database."""

    wandb: WandbConfig | None = None
    """Whether, and how, metrics go to Weights & Biases."""


class Destinations(Config):
    """The sections of a job's file that its worker `tracking` needs."""

    tracking: TrackingConfig | None = None
    """The trackers that get the metrics."""

    alerts: AlertsConfig | None = None
    """The webhook that is told of problems."""

    tracing: TracingConfig | None = None
    """The collector of traces."""

    @classmethod
    def of(cls, job: Config) -> Destinations:
        """Returns those of a job's configuration."""
        return cls(**{name: getattr(job, name) for name in cls.model_fields})
