"""`counterpoint status DIRECTORY`: prints a job's runs, processes and last errors, or a submitted job's workers."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from cli.cluster import status as cluster_status
from cli.display.console import console_for
from cli.display.status_tables import status_parts
from cluster.job_files import holds_job
from job.inspection.status import StatusReader
from job.inspection.why import DROPPED, describe_decision, explain
from transport.printable import printable

WATCH_SECONDS = 2.0
"""Seconds between two updates of `--watch`."""

PIPE_WIDTH = 120


def main(arguments: list[str]) -> int:
    """Runs the command. Returns 0 also for a job that failed: its status was printed."""
    given = _parser().parse_args(arguments)
    if given.why is not None:
        return _why(given.directory, given.why, given.json)
    if given.watch:
        return _watch(given.directory, given.json)
    reader = StatusReader(given.directory)
    if given.json:
        print(json.dumps(_as_json(given.directory, reader), indent=1))
        return 0
    console = _console()
    for part in _parts(given.directory, reader):
        console.print(part, soft_wrap=isinstance(part, Text))
    return 0


def _watch(directory: Path, as_json: bool) -> int:
    """Prints the status again and again until Ctrl-C: in place on a terminal, otherwise one after the other."""
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
                time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        return 0


def _parts(directory: Path, reader: StatusReader) -> list[RenderableType]:
    return cluster_status.read_parts(directory) if holds_job(directory) else status_parts(reader.read())


def _as_json(directory: Path, reader: StatusReader) -> dict[str, Any]:
    return cluster_status.read_json(directory) if holds_job(directory) else reader.read().as_json()


def _why(directory: Path, name: str, as_json: bool) -> int:
    """Prints the decisions about a group of rollouts, or about the newest dropped groups."""
    found = explain(directory, name)
    if as_json:
        print(json.dumps(found, indent=1))
        return 0
    console = _console()
    for run_id, lines in found.items():
        title = f"run {run_id}" if name == DROPPED else f"run {run_id}, group {name.partition('-')[0]}"
        for text in (title, *(f"  {describe_decision(line, name == DROPPED)}" for line in lines)):
            console.print(printable(text), highlight=False, soft_wrap=True)
    return 0


def _console() -> Console:
    return console_for(pipe_width=PIPE_WIDTH, markup=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint status",
        description="Prints a job's state from its output directory, also if its roles were started one by one.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", type=Path, metavar="DIRECTORY")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object for programs; with --watch, one per line"
    )
    parser.add_argument("--watch", action="store_true", help=f"print again every {WATCH_SECONDS:g} s, until Ctrl-C")
    parser.add_argument(
        "--why",
        metavar="GROUP",
        help=f"print what happened to a group of rollouts (12, or a rollout of it: 12-3) and why it was dropped; `{DROPPED}` "
        "prints the newest dropped groups",
    )
    return parser
