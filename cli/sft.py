"""`counterpoint sft FILE`: trains a model on conversations, to begin a run with or alone."""

from __future__ import annotations

from importlib.util import find_spec

from cli.arguments.command import log_to_stderr, parse
from job.resolve_model import resolve_model
from trainer.sft.config import SftConfig
from trainer.sft.launch import run
from transport.errors import UserError


def main(arguments: list[str]) -> int:
    """Runs the command. Returns the trainer's exit code. Raises `UserError` without torch, or for data that cannot be used."""
    command = parse("sft", SftConfig, arguments, ["resume"])
    if command is None:
        return 0
    log_to_stderr()
    config = command.config.model_copy(update={"model": str(resolve_model(command.config.model))})
    if missing := [module for module in ("torch", "transformers", "safetensors") if find_spec(module) is None]:
        raise UserError(f"the trainer needs {', '.join(missing)}; install the extra `cpu`, `gpu` or `train`")
    try:
        return run(config)
    except ValueError as error:
        raise UserError(f"{command.file}: {error}") from error
