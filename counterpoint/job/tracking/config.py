"""`[tracking]` of a job's file: the systems that get the job's metrics besides its own files. Each table turns one on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

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
