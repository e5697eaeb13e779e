"""`counterpoint sweep FILE`: runs one worker of a sweep. Any number of workers, on any machines, share its targets.

With `--workers N` it submits a job of that many workers instead, and waits for it (`counterpoint/job/sweep/submit_workers.py`).
Everything that can be checked is checked before the first claim. `counterpoint sweep status FILE|ROOT` prints the targets of a
whole sweep: as a table, live on a terminal, or as JSON for programs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

from counterpoint.cli.arguments.command import ParsedCommand, log_to_stderr, parse
from counterpoint.cli.cluster.wait import StopJobOnSignals, await_end
from counterpoint.cli.display.console import lasting
from counterpoint.cli.display.sweep_table import print_changes, print_table, show_live, sweep_console
from counterpoint.cluster.errors import ClusterError
from counterpoint.job.check import check_imports
from counterpoint.job.configuration.layers import forget_environment
from counterpoint.job.configuration.load import to_toml
from counterpoint.job.sweep.grid import describe_values
from counterpoint.job.sweep.rows import ReadRows, rows_reader, rows_reader_of
from counterpoint.job.sweep.submit_workers import GivenSweep, check_workers, submit_workers
from counterpoint.job.sweep.targets import SweepConfig, check_files, targets_of
from counterpoint.job.sweep.worker import check_store, run_worker
from counterpoint.transport.errors import UserError
from counterpoint.transport.process import launch

STATUS_USAGE = """usage: counterpoint sweep status FILE|ROOT [--json]

FILE is the sweep's; ROOT the place of one sweep, its `root` with its name, whose results are then not known.
  --json    a list of objects, one a target"""


def main(arguments: list[str]) -> int:
    """Runs the command.

    Exit codes: 0 every target reads SUCCESS; 1 the storage cannot be reached, or submitted workers failed; 2 bad
    configuration; 3 some targets stay FAILED; 128 + the number of the signal that ended it (143, 129, 130), after what was
    claimed was given back.
    """
    if arguments[:1] == ["status"]:
        return print_status(arguments[1:])
    if arguments[:1] in (["-h"], ["--help"]):
        print(f"{STATUS_USAGE}\n")
    command = parse("sweep", SweepConfig, arguments, ["worker"], check, show=_describe)
    if command is None:
        return 0
    config, targets = command.config, targets_of(command.config, command.file)
    variables = forget_environment()
    if "worker" in command.switches:
        log_to_stderr()
        launch.become_subreaper()
        return asyncio.run(run_worker(config, targets))
    console, read = sweep_console(lasting(sys.stdout)), rows_reader_of(config, targets)
    if console.is_terminal:
        _log_above_table(console)
    else:
        log_to_stderr()
    if config.workers is not None:
        code = _run_job(GivenSweep(config, targets, command.file, command.flags, variables), read, console)
    else:
        launch.become_subreaper()
        table = partial(show_live, read, config.name, console, until_settled=False) if console.is_terminal else None
        code = asyncio.run(_run_beside(table, run_worker(config, targets)))
    print_table(read(), config.name, console)
    return code


def check(command: ParsedCommand[SweepConfig]) -> None:
    """Raises `UserError` for what is wrong with any target, or with the storage, before anything is claimed."""
    targets = targets_of(command.config, command.file)
    check_files(targets)
    check_imports([run for target in targets for run in target.runs])
    check_store(command.config, str(command.file))
    if "worker" not in command.switches:
        check_workers(command.config, targets, str(command.file))


def _describe(command: ParsedCommand[SweepConfig]) -> str:
    """What a dry run prints: the file as resolved, and the targets as comments."""
    targets = targets_of(command.config, command.file)
    lines = [f"#   {target.target_id}: {describe_values(target.values)}" for target in targets]
    return "\n".join([to_toml(command.config), f"# {len(targets)} targets:", *lines, ""])


def _log_above_table(console: Console) -> None:
    handler = RichHandler(console=console, show_path=False, omit_repeated_times=False)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])


def _run_job(sweep: GivenSweep, read: ReadRows, console: Console) -> int:
    """Submits the workers, or finds those that an earlier command submitted, and waits for the end of their job."""
    show = partial(show_live, until_settled=False) if console.is_terminal else print_changes
    with StopJobOnSignals() as signals:
        try:
            handle = submit_workers(sweep)
        except ClusterError as error:
            raise UserError(str(error)) from None
        signals.attend(handle)
        table = partial(show, read, sweep.config.name, console)
        code = asyncio.run(_run_beside(table, asyncio.to_thread(await_end, handle)))
    succeeded = {row.status.target_id for row in read() if row.status.state == "SUCCESS"}
    if all(target.target_id in succeeded for target in sweep.targets):
        return 0  # even if a worker of the job has failed
    return code


async def _run_beside(table: Callable[[], Coroutine[Any, Any, None]] | None, work: Coroutine[Any, Any, int]) -> int:
    """Awaits the work while the table of the whole sweep is shown."""
    showing = None if table is None else asyncio.create_task(table())
    try:
        return await work
    finally:
        if showing is not None:
            showing.cancel()
            with suppress(asyncio.CancelledError):
                await showing


def print_status(arguments: list[str]) -> int:
    """`counterpoint sweep status`. Returns 0 whatever the targets' states: they were printed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("where", nargs="?")
    parser.add_argument("--json", action="store_true")
    try:
        given, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError:
        print(STATUS_USAGE)
        return 2
    if given.where is None or unknown:
        print(STATUS_USAGE)
        return 0 if unknown in (["-h"], ["--help"]) else 2
    read = rows_reader(given.where)
    if given.json:
        print(json.dumps([row.as_json() for row in read()], indent=1, default=str))
        return 0
    console = sweep_console(sys.stdout)
    if console.is_terminal:
        asyncio.run(show_live(read, given.where, console, until_settled=True))
    print_table(read(), given.where, console)
    return 0
