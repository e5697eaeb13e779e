"""Checks which runs in the job's directory can be trained, and writes for the others why not.

A configuration is checked once, and again when its file has changed. `counterpoint/trainer/runs/registry.py` keeps the results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from counterpoint.run.trained import TrainedRun
from counterpoint.trainer.runs import control_files
from counterpoint.trainer.runs.control_files import InvalidConfig, RunDirectory
from counterpoint.trainer.runs.registry import RunRegistry
from counterpoint.transport.printable import printable

logger = logging.getLogger(__name__)

MAX_REASON_LENGTH = 4000
"""Characters; a configuration may be wrong in any number of keys."""

ConfigValidationHook = Callable[[TrainedRun], tuple[bool, str]]
"""Returns whether a configuration can be trained and, if not, why and what to do."""


class Admission:
    """Checks the configurations of one job's runs for the registry.

    Writes `control/config_validation_error.txt`, on which the orchestrator ends, and removes it when a configuration passes.
    """

    def __init__(self, output_dir: Path, registry: RunRegistry) -> None:
        """Checks the runs in `output_dir`, and reports to `registry`."""
        self._output_dir = output_dir
        self._registry = registry
        self.hooks: list[ConfigValidationHook] = []
        self._unusable: dict[str, str] = {}
        """Why directories with configurations are no runs, by name, as the log says."""

    def scan(self) -> list[RunDirectory]:
        """Scans the job's directory; returns the runs whose configurations are new or have changed, for `check`."""
        unusable: dict[str, str] = {}
        seen = control_files.scan(self._output_dir, self._registry.expected, unusable)
        for name, reason in unusable.items():
            if self._unusable.get(name) != reason:
                logger.error("%s is ignored: %s", printable(name), reason)
                if reason == control_files.NO_ID:
                    self._write(name.removeprefix("run_"), partial(control_files.refuse_config, message=reason))
        self._unusable = unusable
        evictions = {run_id: self._eviction(run_id) for run_id, found in seen.items() if found.evicted}
        return self._registry.take_scan(seen, evictions)

    def check(self, directories: Iterable[RunDirectory]) -> None:
        """Loads the configurations of these runs, and has the hooks check them."""
        for found in directories:
            self._check(found)

    def refuse(self, run_id: str, reason: str, found: RunDirectory | None = None) -> None:
        """Refuses the configuration of `found`; without it, the configuration that was accepted."""
        reason = reason[:MAX_REASON_LENGTH]
        logger.error("run %s is refused: %s", run_id, reason)
        self._registry.refuse(run_id, reason, found)
        self._write(run_id, partial(control_files.refuse_config, message=reason))

    def _check(self, found: RunDirectory) -> None:
        run_id = found.run_id
        try:
            config = control_files.read_config(self._output_dir, run_id)
            if config is None:
                return  # deleted since the scan, or about to be replaced: the next scan finds out
            for hook in self.hooks:
                ok, message = _validate(hook, config)
                if not ok:
                    raise InvalidConfig(message)
        except InvalidConfig as error:
            self.refuse(run_id, str(error), found)
        else:
            self._registry.accept(found, config)
            self._write(run_id, control_files.accept_config)

    def _write(self, run_id: str, write: Callable[[Path, str], None]) -> None:
        try:
            write(self._output_dir, run_id)
        except OSError as error:  # deleted, or not writable: this concerns the one run
            logger.warning("the result for run %s cannot be written to its directory: %s", run_id, error)

    def _eviction(self, run_id: str) -> str:
        path = control_files.run_directory(self._output_dir, run_id) / "control" / control_files.EVICTED
        reason = control_files.eviction(self._output_dir, run_id) or "the file is gone"
        return f"{reason} ({path}: fix the cause and remove that file to admit the run again)"


def hook_name(hook: Callable[..., object]) -> str:
    """Returns the name of a hook for messages."""
    return f"{getattr(hook, '__module__', '?')}.{getattr(hook, '__qualname__', repr(hook))}"


def _validate(hook: ConfigValidationHook, config: TrainedRun) -> tuple[bool, str]:
    """Calls a hook; one that raises, or does not answer as it should, refuses the configuration."""
    name = f"the config validation hook {hook_name(hook)}"
    try:
        answer: object = hook(config)
    except Exception as error:  # noqa: BLE001 - any error concerns this run alone
        return False, f"{name} failed: {error!r}"
    match answer:
        case (bool(ok), message) if ok or message:
            return ok, str(message)
        case (False, _):
            return False, f"{name} refused it and gave no reason"
    return False, f"{name} returned {answer!r}; expected (is_valid, error_message)"
