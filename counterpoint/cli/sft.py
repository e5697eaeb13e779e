"""`counterpoint sft FILE`: trains a model on conversations, to begin a run with or alone."""

from __future__ import annotations

import logging

from counterpoint.cli.arguments.command import ParsedCommand, log_to_stderr, parse
from counterpoint.job.claim_directory import claim_directory
from counterpoint.job.resolve_model import resolve_model
from counterpoint.trainer.sft.config import SftConfig
from counterpoint.trainer.sft.launch import run
from counterpoint.transport.errors import UserError
from counterpoint.transport.process.extras import TRAINING, require

logger = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Runs the command. Returns the trainer's exit code. Raises `UserError` without torch, or for data that cannot be used."""
    command = parse("sft", SftConfig, arguments, ["resume", "fresh"], check)
    if command is None:
        return 0
    require("the trainer", *TRAINING)
    log_to_stderr()
    config = command.config.model_copy(update={"model": str(resolve_model(command.config.model))})
    with claim_directory(config.output_dir, "fresh" in command.switches) as moved:
        if moved:
            logger.info("moved the earlier training to %s", moved)
        try:
            return run(config)
        except ValueError as error:
            raise UserError(f"{command.file}: {error}") from error


def check(command: ParsedCommand[SftConfig]) -> None:
    """Raises `UserError` for what is wrong with the configuration alone."""
    if "fresh" in command.switches and command.config.resume:
        raise UserError("--resume and --fresh exclude each other")
