"""`counterpoint orchestrator FILE`: runs one orchestrator, alone or, with `--join`, as a guest of a live job."""

from __future__ import annotations

import logging

from cli.arguments.command import Command, parse
from cluster.notify import notify_ready
from job.admin.reload import Reload
from job.check import check_run
from job.configuration.named_files import check_run_files
from job.join import check_goes_on, check_joins, values_of_job
from job.resolve_model import check_model, resolve_model
from run.config import RunConfig
from transport.process.hangup import ReloadOnHangup

logger = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Runs the command. Returns the orchestrator's exit code."""
    command = parse("orchestrator", RunConfig, arguments, ["resume"], check, values_of_job)
    if command is None:
        return 0
    config = command.config.model_copy(update={"model": str(resolve_model(command.config.model))})
    from orchestrator.daemon import run

    reload = Reload(config.output_dir, "orchestrator", arguments, command.config, logger.warning)
    with ReloadOnHangup(reload):
        return run(config, notify_ready)


def check(command: Command[RunConfig]) -> None:
    """Raises `UserError` for what is wrong before anything is started."""
    check_model(command.config.model)
    check_run(command.config)
    check_run_files(command.config)
    if command.join is not None:
        check_joins(command.config, command.join)
        check_goes_on(command.config)
