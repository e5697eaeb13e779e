"""`counterpoint orchestrator FILE`: one run's orchestrator, alone, or with `--join` as a guest of a job that runs."""

from __future__ import annotations

from cli.command import Command, parse
from cli.make_model import resolve
from cluster.notify import notify_ready
from job.check import check_run
from job.join import check_joins, values_of_job
from run.config import RunConfig


def main(arguments: list[str]) -> int:
    """The command."""
    command = parse("orchestrator", RunConfig, arguments, ["resume"], check, values_of_job)
    if command is None:
        return 0
    config = command.config.model_copy(update={"model": str(resolve(command.config.model))})
    from orchestrator.daemon import run

    return run(config, notify_ready)


def check(command: Command[RunConfig]) -> None:
    """What can be found wrong before anything is started. Raises `UserError`."""
    check_run(command.config)
    if command.join is not None:
        check_joins(command.config, command.join)
