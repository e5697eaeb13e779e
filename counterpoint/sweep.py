"""Workers that race for one list of targets, and a training as a target (docs/sweep.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.public_names import public_names

if TYPE_CHECKING:
    from job.sweep.training import extras_for_resources as extras_for_resources
    from job.sweep.training import resolve_training_env as resolve_training_env
    from job.sweep.training import run_training_on_worker as run_training_on_worker
    from sweep import *
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
