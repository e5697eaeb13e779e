"""`counterpoint tune FILE`: runs an experiment over trials, shows a table of them, and prints the best.

`tune resume DIRECTORY` goes on with one that was stopped or killed, or whose trials have failed; `tune status DIRECTORY`
(`counterpoint/cli/tune/status.py`) shows it from outside.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

from counterpoint.cli.arguments.command import ParsedCommand, log_to_stderr, parse
from counterpoint.cli.display.console import console_for, lasting
from counterpoint.cli.display.tune_table import LiveTable
from counterpoint.cli.tune import status
from counterpoint.job.configuration.layers import forget_environment
from counterpoint.transport.errors import Obstructed, UserError
from counterpoint.transport.files.lock import holder_of, take_lock
from counterpoint.transport.process.stop_requests import StopRequests
from counterpoint.tune.check import check_experiment
from counterpoint.tune.config import TuneConfig
from counterpoint.tune.errors import TuneError
from counterpoint.tune.file_experiment import FileExperiment, run_to_end
from counterpoint.tune.runner.journal import LOCK_NAME, holds_experiment
from counterpoint.tune.runner.resume import Resume
from counterpoint.tune.runner.trial_runner import TrialRunner
from counterpoint.tune.telemetry import ExperimentTelemetry
from counterpoint.tune.trial import Trial

USAGE = """usage: counterpoint tune resume DIRECTORY [--errored]

  --errored   trials that have failed for good run again, from their newest checkpoint, with no failures counted"""

PIPE_WIDTH = 140


def main(arguments: list[str]) -> int:
    """Runs the command.

    Exit codes: 0 every trial has ended well; 1 a trial has failed for good, or the job has; 2 bad configuration; 128 + the number
    of the signal that stopped it (143, 129, 130), after which `tune resume` goes on.
    """
    if arguments[:1] == ["status"]:
        return status.main(arguments[1:])
    if arguments[:1] == ["resume"]:
        return _resume(arguments[1:])
    if arguments[:1] in (["-h"], ["--help"]):
        print(f"{USAGE}\n{status.USAGE}\n")
    command = parse("tune", TuneConfig, arguments, ["fresh"], check)
    if command is None:
        return 0
    experiment = FileExperiment(command.config, command.file)
    forget_environment()
    if "fresh" in command.switches:
        _move_aside(experiment.directory)
    if holds_experiment(experiment.directory):
        raise UserError(
            f"{experiment.directory} holds this experiment already: go on with `counterpoint tune resume "
            f"{experiment.directory}`, or begin anew with --fresh or another name"
        )
    experiment.write()
    return _run(experiment, False)


def check(command: ParsedCommand[TuneConfig]) -> None:
    """Raises `UserError` for what is wrong with the configuration, before anything is started."""
    check_experiment(FileExperiment(command.config, command.file), begins=True)


def _resume(arguments: list[str]) -> int:
    is_errored, words = "--errored" in arguments, [word for word in arguments if word != "--errored"]
    if len(words) != 1 or words[0].startswith("-"):
        print(USAGE)
        return 0 if words in (["-h"], ["--help"]) else 2
    experiment = FileExperiment.in_directory(Path(words[0]))
    check_experiment(experiment, begins=False)
    forget_environment()
    # "AUTO" begins one that was ended before anything was journalled.
    return _run(experiment, "ERRORED_ONLY" if is_errored and holds_experiment(experiment.directory) else "AUTO")


def _run(experiment: FileExperiment, resume: Resume) -> int:
    config, again = experiment.config, f"counterpoint tune resume {experiment.directory}"
    console = console_for(lasting(sys.stdout), pipe_width=PIPE_WIDTH, markup=False)
    if console.is_terminal:
        _log_above_table(console)
    else:
        log_to_stderr()
    executor = experiment.executor()
    table = LiveTable(console, config.name, config.metric, config.mode, executor.debug_string)
    runner = experiment.runner(executor, [table], resume)
    telemetry = ExperimentTelemetry(config, experiment.directory)
    console.print(f"{config.name}: {experiment.directory}", highlight=False)
    try:
        with telemetry.of(runner):
            received = asyncio.run(_run_until_signal(lambda stop: run_to_end(runner, stop)))
    except TuneError as error:
        raise Obstructed(f"{error}\nIt goes on with: {again}{' --errored' if _failed(runner) else ''}") from None
    finally:
        table.close()
    if received:
        console.print(f"It goes on with: {again}", highlight=False, soft_wrap=True)
        return 128 + received[0]
    if failed := _failed(runner):
        said = f"{failed} of its trials failed; they run again with: {again} --errored"
        console.print(said, highlight=False, soft_wrap=True)
    return 1 if failed else 0


def _failed(runner: TrialRunner) -> int:
    return sum(trial.status == Trial.ERROR for trial in runner.get_trials())


async def _run_until_signal(begin: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> list[signal.Signals]:
    """Runs; the first signal stops in order, the second at once. Returns the signals."""
    stop, requests = asyncio.Event(), StopRequests()
    received: list[signal.Signals] = []
    work = asyncio.ensure_future(begin(stop))

    def heed(number: signal.Signals) -> None:
        if requests.note() == 0:
            return
        received.append(number)
        logging.getLogger(__name__).info(
            "%s: %s", number.name, "ending at once" if stop.is_set() else "stopping in order"
        )
        if stop.is_set():
            work.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue  # nohup started the process, so it outlives its terminal
        asyncio.get_running_loop().add_signal_handler(number, heed, number)
    try:
        await work
    except asyncio.CancelledError:
        if not received:
            raise
    return received


def _move_aside(directory: Path) -> None:
    """Renames an experiment's directory. Raises `UserError` if a runner is at work in it: it would go on, beside the new one."""
    if not directory.exists():
        return
    try:
        lock = take_lock(directory / LOCK_NAME, "a runner has it")  # and keeps it: one may begin meanwhile
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        holder = holder_of(directory / LOCK_NAME)
        who = f"process {holder.pid} on {holder.host}" if holder is not None and holder.pid else "another process"
        raise UserError(f"{directory}: {who} runs this experiment; stop it before --fresh") from None
    try:
        number = 1
        while (aside := directory.with_name(f"{directory.name}.{number}")).exists():
            number += 1
        directory.rename(aside)
    finally:
        os.close(lock)


def _log_above_table(console: Console) -> None:
    handler = RichHandler(console=console, show_path=False, omit_repeated_times=False)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])
