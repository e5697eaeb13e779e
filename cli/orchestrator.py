"""`counterpoint orchestrator FILE`: one run's orchestrator, alone."""

from __future__ import annotations

from cli.check import check_run
from cli.command import parse
from cli.make_model import resolve
from cluster.notify import notify_ready
from orchestrator.config import OrchestratorConfig


def main(arguments: list[str]) -> int:
    """The command."""
    command = parse("orchestrator", OrchestratorConfig, arguments, ["resume"], lambda config, _: check_run(config))
    if command is None:
        return 0
    config = command.config.model_copy(update={"model": str(resolve(command.config.model))})
    from orchestrator.daemon import run

    return run(config, notify_ready)
