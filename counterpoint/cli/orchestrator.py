"""`counterpoint orchestrator FILE`: runs one orchestrator, alone or, with `--join`, as a guest of a live job."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial

from counterpoint.cli.arguments.command import ParsedCommand, parse
from counterpoint.environments.import_path import only_imports
from counterpoint.job.admin.reload import Reload
from counterpoint.job.check import check_run
from counterpoint.job.configuration.named_files import check_run_files
from counterpoint.job.join import allowed_imports, check_goes_on, check_joins, values_of_job
from counterpoint.job.resolve_model import check_model, resolve_model
from counterpoint.run.config import RunConfig
from counterpoint.transport.process.hangup import ReloadOnHangup
from counterpoint.transport.process.notify import notify_ready

logger = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Runs the command. Returns the orchestrator's exit code."""
    with ExitStack() as as_guest:
        command = parse("orchestrator", RunConfig, arguments, ["resume"], partial(check, as_guest), values_of_job)
        return 0 if command is None else _run(command, arguments)


def _run(command: ParsedCommand[RunConfig], arguments: list[str]) -> int:
    config = command.config.model_copy(update={"model": str(resolve_model(command.config.model))})
    from counterpoint.orchestrator.daemon import run

    reload = Reload(config.output_dir, "orchestrator", arguments, command.config, logger.warning)
    with ReloadOnHangup(reload):
        return run(config, notify_ready)


def check(as_guest: ExitStack, command: ParsedCommand[RunConfig]) -> None:
    """Raises `UserError` for what is wrong before anything is started.

    A guest imports only what the job allows, until the end of `as_guest`.
    """
    if command.join is not None:
        as_guest.enter_context(only_imports(allowed_imports(command.join)))
    check_model(command.config.model)
    check_run(command.config)
    check_run_files(command.config)
    if command.join is not None:
        check_joins(command.config, command.join)
        check_goes_on(command.config)
