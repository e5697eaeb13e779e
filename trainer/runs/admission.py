"""Who may come in: the runs in the job's directory whose configurations can be trained, and why the others cannot.

A configuration is judged once, and again when its file has changed; `trainer/runs/manager.py` gives places to those that pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from run.config import RunConfig
from trainer.runs import control_files
from trainer.runs.control_files import InvalidConfig, Sighting

logger = logging.getLogger(__name__)

MAX_REASON_LENGTH = 4000
"""Characters: a configuration may be wrong in as many places as it has."""

ConfigValidationHook = Callable[[RunConfig], tuple[bool, str]]
"""Answers whether a configuration can be trained and, if not, why and what to do."""


@dataclass(frozen=True, slots=True)
class Admissible:
    """A run that may have a place."""

    sighting: Sighting
    config: RunConfig


class Admission:
    """The verdicts on the runs of one job. Writes `control/config_validation_error.txt`, on which the orchestrator ends, and
    removes the file when a configuration passes."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._passed: dict[str, Admissible] = {}
        self._failed: dict[str, tuple[Sighting, str]] = {}
        self.hooks: list[ConfigValidationHook] = []
        self.refused: dict[str, str] = {}
        """Runs that may not come in as they are, and why, for people."""

    def look(self) -> dict[str, Admissible]:
        """Scans the directory; the runs that may come in, by id."""
        seen = control_files.scan(self._output_dir)
        for judged in (self._passed, self._failed):
            for run_id in judged.keys() - seen.keys():
                del judged[run_id]
        evicted = {run_id: self._eviction(run_id) for run_id, sighting in seen.items() if sighting.evicted}
        for run_id in seen.keys() - evicted.keys():
            self._check(seen[run_id])
        self.refused = {run_id: reason for run_id, (_, reason) in self._failed.items()} | evicted
        return {run_id: passed for run_id, passed in self._passed.items() if run_id not in evicted}

    def refuse(self, run_id: str, reason: str) -> None:
        """Takes a configuration that passed for one that cannot be trained after all."""
        self._refuse(self._passed[run_id].sighting, reason)

    def _check(self, sighting: Sighting) -> None:
        run_id = sighting.run_id
        passed, failed = self._passed.get(run_id), self._failed.get(run_id)
        if (passed is not None and passed.sighting == sighting) or (failed is not None and failed[0] == sighting):
            return
        try:
            config = control_files.read_config(self._output_dir, run_id)
            if config is None:
                return  # gone since the scan, or about to be replaced: the next look will tell
            for hook in self.hooks:
                ok, message = _ask(hook, config)
                if not ok:
                    raise InvalidConfig(message)
        except InvalidConfig as error:
            self._refuse(sighting, str(error))
        else:
            self._failed.pop(run_id, None)
            self._passed[run_id] = Admissible(sighting, config)
            self._tell(run_id, control_files.accept_config)

    def _refuse(self, sighting: Sighting, reason: str) -> None:
        reason = reason[:MAX_REASON_LENGTH]
        logger.error("run %s is refused: %s", sighting.run_id, reason)
        self._passed.pop(sighting.run_id, None)
        self._failed[sighting.run_id] = (sighting, reason)
        self.refused[sighting.run_id] = reason
        self._tell(sighting.run_id, partial(control_files.refuse_config, message=reason))

    def _tell(self, run_id: str, verdict: Callable[[Path, str], None]) -> None:
        try:
            verdict(self._output_dir, run_id)
        except OSError as error:  # deleted, or not ours to write: its own concern, as all about it is
            logger.warning("the verdict on run %s cannot be written to its directory: %s", run_id, error)

    def _eviction(self, run_id: str) -> str:
        path = control_files.run_directory(self._output_dir, run_id) / "control" / control_files.EVICTED
        reason = control_files.eviction(self._output_dir, run_id) or "no reason is left"
        return f"{reason} ({path}: mend its cause and remove that file to let the run in again)"


def hook_name(hook: Callable[..., object]) -> str:
    """How a hook is called in messages."""
    return f"{getattr(hook, '__module__', '?')}.{getattr(hook, '__qualname__', repr(hook))}"


def _ask(hook: ConfigValidationHook, config: RunConfig) -> tuple[bool, str]:
    """The hook's answer; one that raises says no, as it is this configuration that it could not judge."""
    try:
        return hook(config)
    except Exception as error:  # noqa: BLE001 - whatever it is, it concerns one run
        return False, f"the config validation hook {hook_name(hook)} failed: {error!r}"
