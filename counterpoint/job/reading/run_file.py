"""What the overview needs of a run's configuration, without the milliseconds that its whole file would take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from counterpoint.job.directory import as_steps
from counterpoint.job.reading.metrics.metrics_lines import is_number
from counterpoint.run.config import LagConfig, ScheduleConfig
from counterpoint.trainer.runs.control_files import MAX_CONFIG_BYTES
from counterpoint.transport.files.untrusted import UntrustedFileError, parse_toml, read_bytes

STALL_WARNING_SECONDS = 60.0
"""`RunConfig.stall_warning_seconds` by default."""

_LAG = LagConfig()
_FIRST_TABLE = re.compile(rb"^\[", re.MULTILINE)
_LAG_TABLE = re.compile(rb"^\[lag\]$(.*?)(?=^\[|\Z)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class RunFile:
    """Some values of a run's configuration; the default of what is not there or is no number."""

    steps: int | None = None
    stall_warning_seconds: float = STALL_WARNING_SECONDS
    warn_p90_seconds: float = _LAG.warn_p90_seconds
    warn_p99_seconds: float = _LAG.warn_p99_seconds
    warn_max_seconds: float = _LAG.warn_max_seconds
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> RunFile:
        """Takes the values from a run's configuration, which anybody may have written."""
        lag = table.get("lag")
        lag = lag if isinstance(lag, dict) else {}
        return cls(
            as_steps(table.get("steps")),
            _number(table, "stall_warning_seconds", STALL_WARNING_SECONDS),
            _number(lag, "warn_p90_seconds", _LAG.warn_p90_seconds),
            _number(lag, "warn_p99_seconds", _LAG.warn_p99_seconds),
            _number(lag, "warn_max_seconds", _LAG.warn_max_seconds),
            _schedule_of(table.get("schedule")),
        )


def _schedule_of(table: object) -> ScheduleConfig:
    try:
        return ScheduleConfig.model_validate(table)
    except ValueError:
        return ScheduleConfig()


class RunFiles:
    """The files `control/orch.toml` of a job's runs, each read when it has changed."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int, int], RunFile]] = {}

    def read(self, run_dir: Path) -> RunFile:
        """Returns the run's values; the defaults if it has no such file, or one that is no configuration."""
        path = run_dir / "control" / "orch.toml"
        try:
            found = path.lstat()
            identity = (found.st_ino, found.st_size, found.st_mtime_ns)
            known = self._known.get(path)
            if known is None or known[0] != identity:
                known = self._known[path] = identity, _parsed(read_bytes(path, MAX_CONFIG_BYTES))
        except (OSError, UntrustedFileError):
            self._known.pop(path, None)
            return RunFile()
        return known[1]

    def keep(self, run_dirs: set[Path]) -> None:
        """Forgets all other runs."""
        self._known = {path: known for path, known in self._known.items() if path.parents[1] in run_dirs}


def _parsed(content: bytes) -> RunFile:
    """The values of the keys before the first table, and of `[lag]`: their text alone is parsed."""
    table = _table(content[: found.start()] if (found := _FIRST_TABLE.search(content)) else content)
    if found := _LAG_TABLE.search(content):
        table["lag"] = _table(found[1])
    return RunFile.of(table)


def _table(text: bytes) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except UntrustedFileError:
        return {}


def _number(table: Mapping[str, Any], name: str, default: float) -> float:
    value = table.get(name)
    return float(value) if is_number(value) and value is not None and value > 0 else default
