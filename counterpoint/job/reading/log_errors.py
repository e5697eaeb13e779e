"""The last error in the log of each worker, and of each guest."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from counterpoint.job.reading.log_files import log_files_in, trainer_logs
from counterpoint.transport.process.child import last_lines

ERROR_LINE = re.compile(r"\b(ERROR|CRITICAL|Error:|Exception:)|counterpoint: error")

MOST_LINES = 500
"""Lines searched from the end of a log."""

ENGINE_STOPPED = "[shutdown] EngineCore: trigger received signal"
"""What vLLM logs of a signal that stops its engine."""

_OVER = re.compile(r"The outage is over: (.+?) since \d")
"""What a log says of an outage that has ended (`transport/outages.py`): the errors before it that name it are over, too."""


def last_errors_of_workers(
    directory: Path, workers: Sequence[Mapping[str, Any]], *, killed: bool = False
) -> dict[str, str]:
    """Returns the newest error line of each worker by name, from its output since the newest start of the job.

    A worker that was stopped: only its output before the stop request counts, since vLLM logs every shutdown as an error. With
    `killed`, nobody noted the request, nor starts a worker again: an engine's output counts up to the last signal that it got.
    """
    errors: dict[str, str] = {}
    for worker in workers:
        name, start = worker["name"], worker["log_from"]
        if start is None:
            continue
        end = worker["log_until"] if worker["state"] in ("stopping", "stopped") else None
        log_file = trainer_logs(directory).get(name, directory / f"{name}.log")
        if error := _last_error(log_file, start, end, killed=killed):
            errors[name] = error
    return errors


def last_errors_of_guests(directory: Path, run_ids: Iterable[str]) -> dict[str, str]:
    """Returns the newest error line of each guest, under `run ID`, from its log."""
    logs = log_files_in(directory) if (guests := sorted(run_ids)) else {}
    return {f"run {guest}": error for guest in guests if guest in logs and (error := _last_error(logs[guest]))}


def _last_error(log_file: Path, start: int = 0, end: int | None = None, *, killed: bool = False) -> str | None:
    lines = last_lines(log_file, MOST_LINES, start, end)
    stops = [place for place, line in enumerate(lines) if ENGINE_STOPPED in line] if killed else []
    lines = lines[: stops[-1]] if stops else lines
    over: set[str] = set()
    for line in reversed(lines):
        if (ended := _OVER.search(line)) is not None:
            over.add(ended[1])
        elif ERROR_LINE.search(line) and not any(outage in line for outage in over):
            return line
    return None
