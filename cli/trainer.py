"""`counterpoint trainer FILE`: the trainer, alone; it starts its own ranks when there are several."""

from __future__ import annotations

from cli.command import log_to_stderr, parse
from cli.make_model import resolve
from cluster.notify import notify_ready
from job.errors import UserError
from trainer.config import TrainerConfig


def main(arguments: list[str]) -> int:
    """The command."""
    command = parse("trainer", TrainerConfig, arguments, ["resume"])
    if command is None:
        return 0
    log_to_stderr()
    config = command.config.model_copy(update={"model": str(resolve(command.config.model))})
    try:
        from trainer.train import train
    except ModuleNotFoundError as error:
        raise UserError(f"the trainer needs {error.name}; install the extra `cpu`, `gpu` or `train`") from None

    return train(config, notify_ready)
