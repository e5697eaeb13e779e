"""What `counterpoint status` prints: a job's runs, processes and last errors, or a submitted job's workers."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from counterpoint.cli.cluster import status as cluster_status
from counterpoint.cli.display.console import console_for
from counterpoint.cli.display.start_picture import start_picture
from counterpoint.cli.display.status_tables import status_parts
from counterpoint.cluster.job_files import holds_job
from counterpoint.job.reading.activity.why import DROPPED, describe_decision, explain
from counterpoint.job.reading.start import read_start, start_as_json
from counterpoint.job.reading.status import StatusReader
from counterpoint.transport.printable import printable

PIPE_WIDTH = 120


def print_once(directory: Path, as_json: bool) -> None:
    """Prints the status of the job in `directory`, as tables or as one JSON object. Raises `UserError`."""
    reader = StatusReader(directory)
    if as_json:
        print(json.dumps(_as_json(directory, reader), indent=1))
        return
    console = _console()
    for part in _parts(directory, reader):
        console.print(part, soft_wrap=isinstance(part, Text))


def watch(directory: Path, as_json: bool, seconds: float) -> None:
    """Prints the status every so many `seconds` until Ctrl-C: in place on a terminal, otherwise one after the other."""
    console, reader = _console(), StatusReader(directory)
    live = Live(console=console, auto_refresh=False) if console.is_terminal and not as_json else None
    try:
        with live or nullcontext():
            while True:
                if as_json:
                    print(json.dumps(_as_json(directory, reader)), flush=True)
                elif live is not None:
                    live.update(Group(*_parts(directory, reader)), refresh=True)
                else:
                    console.print(*_parts(directory, reader), sep="\n", soft_wrap=True)
                time.sleep(seconds)
    except KeyboardInterrupt:
        return


def _parts(directory: Path, reader: StatusReader) -> list[RenderableType]:
    return cluster_status.read_parts(directory) if holds_job(directory) else status_parts(reader.read())


def _as_json(directory: Path, reader: StatusReader) -> dict[str, Any]:
    return cluster_status.read_json(directory) if holds_job(directory) else reader.read().as_json()


def print_why(directory: Path, name: str, as_json: bool) -> None:
    """Prints the decisions about a group of rollouts, or about the newest dropped groups."""
    found = explain(directory, name)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    console = _console()
    for run_id, lines in found.items():
        title = f"run {run_id}" if name == DROPPED else f"run {run_id}, group {name.partition('-')[0]}"
        for text in (title, *(f"  {describe_decision(line, name == DROPPED)}" for line in lines)):
            console.print(printable(text), highlight=False, soft_wrap=True)


def print_start(directory: Path, as_json: bool) -> None:
    """Prints what each process did in the job's start, as bars or as JSON. Raises `UserError` if nothing is known of it."""
    processes = read_start(directory)
    if as_json:
        print(json.dumps(start_as_json(processes), indent=1))
        return
    console = _console()
    for line in start_picture(processes, console.width):
        console.print(line, highlight=False, soft_wrap=True)


def _console() -> Console:
    return console_for(pipe_width=PIPE_WIDTH, markup=False)
