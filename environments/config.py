"""Configuration of one environment in a run's mix."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from transport.config import Config, Identifier


class EnvironmentConfig(Config):
    """One environment of the mix."""

    name: Identifier
    """Unique in the run; metrics and records carry it."""

    kind: str
    """A built-in (`reverse-text`, `guess-number`, `closest-number`) or an import path, `package.module:Class`."""

    args: dict[str, Any] = {}
    """Keyword arguments of the environment's constructor."""

    ratio: float = Field(default=1.0, gt=0)
    """Share of groups, relative to the other environments' ratios."""

    rollout_timeout_seconds: float = Field(default=300.0, gt=0)
    """Deadline of one rollout, scoring included. One that misses it fails; the rest go on."""

    state_columns: list[str] = []
    """Keys of a rollout's `state` to add to its saved record."""
