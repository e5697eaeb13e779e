"""`counterpoint tinker FILE`, a job with the service for the Tinker SDK; `counterpoint service FILE`, the service alone."""

from __future__ import annotations

from counterpoint.cli import run
from counterpoint.cli.arguments.command import log_to_stderr, parse
from counterpoint.job.config import JobConfig
from counterpoint.job.resolve_model import resolve_model
from counterpoint.service.config import ServiceConfig, TinkerConfig
from counterpoint.transport.process.hangup import ReloadOnHangup, note_hangup
from counterpoint.transport.process.notify import notify_ready


class TinkerJobConfig(JobConfig):
    """A job whose runs are trained by clients of the Tinker SDK, whether its file has `[tinker]` or not."""

    tinker: TinkerConfig | None = TinkerConfig()


def tinker(arguments: list[str]) -> int:
    """Runs the job. Returns its exit code."""
    return run.main(arguments, "tinker", TinkerJobConfig)


def service(arguments: list[str]) -> int:
    """Runs the service. Returns its exit code. Raises `UserError` for a wrong configuration."""
    command = parse("service", ServiceConfig, arguments, [])
    if command is None:
        return 0
    log_to_stderr()
    config = command.config.model_copy(update={"model": str(resolve_model(command.config.model))})
    from counterpoint.service.daemon import run as serve

    with ReloadOnHangup(note_hangup):
        return serve(config, notify_ready)
