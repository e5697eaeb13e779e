"""`counterpoint inference FILE`: one vLLM server with our plugin, alone."""

from __future__ import annotations

from cli.command import log_to_stderr, parse
from cli.make_model import resolve
from cluster.notify import Heartbeat, notify_ready
from inference.config import InferenceConfig


def main(arguments: list[str]) -> int:
    """The command."""
    command = parse("inference", InferenceConfig, arguments)
    if command is None:
        return 0
    log_to_stderr()
    config = command.config.model_copy(update={"model": str(resolve(command.config.model))})
    from inference.server import serve

    heartbeat = Heartbeat()

    def beat(trouble: str) -> None:
        heartbeat.tell(trouble)
        if not trouble:  # else the supervisor shall do something about it
            heartbeat.beat()

    return serve(config, notify_ready, beat)
