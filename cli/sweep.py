"""`counterpoint sweep FILE`: runs one worker of a sweep. Any number of workers, on any machines, share its targets.

Everything that can be checked is checked before the first claim. `counterpoint sweep status` (`cli/sweep_status.py`) shows the
whole sweep.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

from cli import sweep_status
from cli.arguments.command import Command, log_to_stderr, parse
from cli.display.console import lasting
from cli.display.sweep_table import print_table, show_live, sweep_console
from cluster import launch
from job.check import check_imports
from job.configuration.layers import forget_environment
from job.configuration.load import to_toml
from job.sweep.grid import describe_values
from job.sweep.rows import rows_reader_of
from job.sweep.targets import SweepConfig, Target, targets_of
from job.sweep.worker import check_store, run_worker


def main(arguments: list[str]) -> int:
    """Runs the command.

    Exit codes: 0 every target reads SUCCESS; 1 some stay FAILED, or the storage cannot be reached; 2 bad configuration;
    128 + the number of the signal that ended it (143, 129, 130), after the claim was given back.
    """
    if arguments[:1] == ["status"]:
        return sweep_status.main(arguments[1:])
    if arguments[:1] in (["-h"], ["--help"]):
        print(f"{sweep_status.USAGE}\n")
    command = parse("sweep", SweepConfig, arguments, ["worker"], check, show=_describe)
    if command is None:
        return 0
    config, targets = command.config, targets_of(command.config, command.file)
    forget_environment()
    launch.become_subreaper()
    if "worker" in command.switches:
        log_to_stderr()
        return asyncio.run(run_worker(config, targets))
    console, read = sweep_console(lasting(sys.stdout)), rows_reader_of(config, targets)
    if console.is_terminal:
        _log_above_table(console)
        table = show_live(read, config.name, console, until_settled=False)
        code = asyncio.run(_run_beside(table, config, targets))
    else:
        log_to_stderr()
        code = asyncio.run(run_worker(config, targets))
    print_table(read(), config.name, console)
    return code


def check(command: Command[SweepConfig]) -> None:
    """Raises `UserError` for what is wrong with any target, or with the storage, before anything is claimed."""
    targets = targets_of(command.config, command.file)
    check_imports([run for target in targets for run in target.runs])
    check_store(command.config, str(command.file))


def _describe(command: Command[SweepConfig]) -> str:
    """What a dry run prints: the file as resolved, and the targets as comments."""
    targets = targets_of(command.config, command.file)
    lines = [f"#   {target.target_id}: {describe_values(target.values)}" for target in targets]
    return "\n".join([to_toml(command.config), f"# {len(targets)} targets:", *lines, ""])


def _log_above_table(console: Console) -> None:
    handler = RichHandler(console=console, show_path=False, omit_repeated_times=False)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])


async def _run_beside(table: Coroutine[Any, Any, None], config: SweepConfig, targets: Sequence[Target]) -> int:
    """Runs the worker while the table of the whole sweep is shown."""
    showing = asyncio.create_task(table)
    try:
        return await run_worker(config, targets)
    finally:
        showing.cancel()
        with suppress(asyncio.CancelledError):
            await showing
