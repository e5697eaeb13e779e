"""`counterpoint sweep FILE`: one worker of a sweep. Any number of them, on any machines, share out its targets among themselves.

Everything that can be checked is, before the first claim. Then `sweep.claim` says which target is ours, `job/sweep/body.py` runs
it, and a signal gives it back. `cli/sweep_status.py` shows the whole.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

from cli import sweep_status
from cli.command import Command, log_to_stderr, parse
from cli.display.console import lasting
from cli.sweep_status import console_for, print_table, show_live
from cluster import launch
from job.check import check_imports
from job.configuration.layers import forget_environment
from job.configuration.load import to_toml
from job.errors import UserError
from job.sweep.body import run_target
from job.sweep.grid import shown
from job.sweep.rows import looking
from job.sweep.targets import SweepConfig, Target, targets_of
from sweep.claim import SweepFailed, SweepTarget, claim_and_run_async
from sweep.lock import Claim, PreviousTaskFailed
from sweep.open_store import open_store
from sweep.record import RecordError
from sweep.store import UnsafeStoreError
from transport.process.stop_requests import StopRequests

logger = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """The command. Exit codes: 0 every target reads SUCCESS; 1 some stay FAILED, or the storage cannot be reached; 2 bad
    configuration; 128 + the number of the signal that ended it (143, 129, 130): the claim was given back."""
    if arguments[:1] == ["status"]:
        return sweep_status.main(arguments[1:])
    if arguments[:1] in (["-h"], ["--help"]):
        print(f"{sweep_status.USAGE}\n")
    command = parse("sweep", SweepConfig, arguments, ["worker"], check, show=_show)
    if command is None:
        return 0
    config, targets = command.config, targets_of(command.config, command.file)
    forget_environment()
    launch.become_subreaper()
    if "worker" in command.switches:
        log_to_stderr()
        return asyncio.run(_work(config, targets))
    console, look = console_for(lasting(sys.stdout)), looking(config, targets)
    if console.is_terminal:
        logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[_above_the_table(console)])
        code = asyncio.run(_beside(show_live(look, config.name, console, until_settled=False), config, targets))
    else:
        log_to_stderr()
        code = asyncio.run(_work(config, targets))
    print_table(look(), config.name, console)
    return code


def check(command: Command[SweepConfig]) -> None:
    """What can be found wrong before anything is claimed: each target, whole. Raises `UserError`."""
    config, targets = command.config, targets_of(command.config, command.file)
    check_imports([run for target in targets for run in target.runs])
    try:
        open_store(config.store)
    except (UnsafeStoreError, ValueError, ImportError) as error:
        raise UserError(f"{command.file}: root = {config.root!r}: {error}") from None


def _show(command: Command[SweepConfig]) -> str:
    """For a dry run: the file as resolved, and below it, as its comments, the targets."""
    targets = targets_of(command.config, command.file)
    lines = [f"#   {target.target_id}: {shown(target.values)}" for target in targets]
    return "\n".join([to_toml(command.config), f"# {len(targets)} targets:", *lines, ""])


def _above_the_table(console: Console) -> logging.Handler:
    return RichHandler(console=console, show_path=False, omit_repeated_times=False)


async def _beside(table: Coroutine[Any, Any, None], config: SweepConfig, targets: Sequence[Target]) -> int:
    """The worker, while the whole sweep is shown."""
    showing = asyncio.create_task(table)
    try:
        return await _work(config, targets)
    finally:
        showing.cancel()
        with suppress(asyncio.CancelledError):
            await showing


async def _work(config: SweepConfig, targets: Sequence[Target]) -> int:
    """A worker's life: until every target reads SUCCESS, until some stay FAILED, or until a signal; the exit code."""

    async def body(target: SweepTarget[Target], claim: Claim) -> None:
        await run_target(target.config, claim, config.lease_seconds)

    work = asyncio.ensure_future(
        claim_and_run_async(
            config.store,
            [SweepTarget(target.target_id, target) for target in targets],
            body,
            max_attempts=config.max_attempts,
            heartbeat=config.heartbeat_seconds,
            lease=config.lease_seconds,
        )
    )
    received = _cancel_on_signals(work)
    try:
        await work
    except asyncio.CancelledError:
        return 128 + received[0]
    except UnsafeStoreError as error:
        raise UserError(str(error)) from None
    except SweepFailed as error:
        for failure in error.exceptions:
            if isinstance(failure, PreviousTaskFailed | RecordError):  # our own attempts' are in the log
                logger.error("%s", failure)
        logger.error("%s; a larger max_attempts has them tried again", error.message)
        return 1
    logger.info("every target of %s reads SUCCESS", config.name)
    return 0


def _cancel_on_signals(work: asyncio.Future[None]) -> list[signal.Signals]:
    """The first signal has the target drain and be given back, a second one has it killed. Returns those that have come, as they
    come."""
    received: list[signal.Signals] = []

    requests = StopRequests()

    def cancel(number: signal.Signals) -> None:
        if requests.note() == 0:
            return
        received.append(number)
        logger.info("%s: %s", number.name, "ending at once" if len(received) > 1 else "giving back what is claimed")
        work.cancel()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue  # started by nohup: meant to outlive its terminal
        asyncio.get_running_loop().add_signal_handler(number, cancel, number)
    return received
