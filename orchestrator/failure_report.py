"""The log lines for the error that ended a run, and the exit code for it."""

from __future__ import annotations

import logging
from pathlib import Path

from counterpoint.environments.describe_error import describe_error
from counterpoint.inference.base import InferenceError
from counterpoint.orchestrator.policy import ForeignBroadcastError
from counterpoint.orchestrator.run_directory import (
    ConfigurationError,
    RunEvictedError,
    StartError,
    config_is_refused,
    finish_deletion,
    is_deleted,
)
from counterpoint.orchestrator.step.delivery import ConflictError, EvictedError, MissingBatchError, RejectedError
from counterpoint.orchestrator.step.differences import NothingLearnedError
from counterpoint.run.loop_health.watchdog import StallError
from counterpoint.transport.errors import CheckpointError
from counterpoint.transport.files.atomic import DISK_FAULTS
from counterpoint.transport.process.notify import notify_failure
from counterpoint.transport.process.permanent_errors import (
    DISK_FULL,
    NOTHING_LEARNED,
    PASSING,
    is_disk_full,
    is_passing,
    not_written,
    way_on,
)

logger = logging.getLogger(__name__)

_EXPECTED = (
    CheckpointError, ConflictError, EvictedError, RunEvictedError, RejectedError, MissingBatchError, ForeignBroadcastError,
    StallError, InferenceError, ConfigurationError, StartError, NothingLearnedError, OSError,
)  # fmt: skip
"""Failures with a complete message. Any other is a defect, and is logged with its traceback."""


def report_failure(error: Exception, run_dir: Path) -> int:
    """Logs the error that ended the run and returns the exit code."""
    if is_deleted(run_dir):  # any other error is a consequence
        logger.error("the run's directory %s was deleted: the run ends", run_dir)
        finish_deletion(run_dir)
        return 3
    leaves = _leaves(error)
    expected = [leaf for leaf in leaves if isinstance(leaf, _EXPECTED)]
    if not expected:
        logger.critical("the orchestrator failed", exc_info=error)
        notify_failure("; ".join(map(describe_error, leaves)))
        return 1
    for leaf in expected:
        logger.error("%s", _described(leaf, run_dir))
    notify_failure("; ".join(_described(leaf, run_dir) for leaf in expected))
    if any(isinstance(leaf, ConfigurationError) for leaf in expected):
        return 2
    if any(isinstance(leaf, NothingLearnedError) for leaf in expected):
        return NOTHING_LEARNED
    if any(isinstance(leaf, EvictedError | RunEvictedError) for leaf in expected):
        # A trainer that refuses a configuration also evicts the run. Either may be noticed first.
        return 2 if config_is_refused(run_dir) else 3
    if any(isinstance(leaf, ConflictError) for leaf in expected):
        return 3  # a restart would change nothing
    if any(map(is_disk_full, expected)):
        return DISK_FULL
    return PASSING if any(map(is_passing, expected)) else 1


def _described(error: BaseException, run_dir: Path) -> str:
    if isinstance(error, OSError) and error.errno in DISK_FAULTS:
        return f"{not_written(error, run_dir)}. What was committed before is intact{way_on(error)}"
    return str(error) or repr(error)


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
