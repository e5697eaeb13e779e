"""`counterpoint trainer FILE`: runs the trainer, alone. It starts its own ranks if there are several."""

from __future__ import annotations

from counterpoint.cli.arguments.command import log_to_stderr, parse
from counterpoint.job.resolve_model import resolve_model
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.launch import run
from counterpoint.transport.process.extras import TRAINING, require
from counterpoint.transport.process.hangup import ReloadOnHangup, note_hangup
from counterpoint.transport.process.notify import notify_ready


def main(arguments: list[str]) -> int:
    """Runs the command. Returns the trainer's exit code. Raises `UserError` without torch."""
    command = parse("trainer", TrainerConfig, arguments, ["resume"])
    if command is None:
        return 0
    require("the trainer", *TRAINING)
    log_to_stderr()
    config = command.config.model_copy(update={"model": str(resolve_model(command.config.model))})
    with ReloadOnHangup(note_hangup):
        return run(config, notify_ready)
