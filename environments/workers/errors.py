"""Errors that come from a worker, or are about one. They describe themselves: the place that raised them says nothing."""

from __future__ import annotations

from counterpoint.environments.base import Unavailable


class WorkerError(RuntimeError):
    """What failed in a worker, or ended it, for a person. The text is complete."""


class UnavailableError(WorkerError, Unavailable):
    """The environment raised `Unavailable` in its worker."""
