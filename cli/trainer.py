"""`counterpoint trainer FILE`: runs the trainer, alone. It starts its own ranks if there are several."""

from __future__ import annotations

from cli.arguments.command import log_to_stderr, parse
from cluster.notify import notify_ready
from job.resolve_model import resolve_model
from trainer.config import TrainerConfig
from trainer.launch import run
from transport.process.extras import TRAINING, require
from transport.process.hangup import ReloadOnHangup, note_hangup


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
