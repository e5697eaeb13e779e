"""`counterpoint inference FILE`: runs one vLLM server with our plugin, alone."""

from __future__ import annotations

from counterpoint.inference.early_program import EarlyProgram, early_program
from counterpoint.transport.process.imports import ended_by_interrupt, without_gc


def main(arguments: list[str]) -> int:
    """Runs the command. Returns the server's exit code. Raises `UserError` without vLLM."""
    with early_program(arguments) as early:  # it imports torch while this process imports the rest
        return _run(arguments, early)


def _run(arguments: list[str], early: EarlyProgram | None) -> int:
    with ended_by_interrupt(), without_gc():
        from counterpoint.cli.arguments.command import log_to_stderr, parse
        from counterpoint.inference.config import InferenceConfig
        from counterpoint.inference.server import serve
        from counterpoint.job.resolve_model import resolve_model
        from counterpoint.transport.process.extras import SERVING, require
        from counterpoint.transport.process.hangup import ReloadOnHangup, note_hangup
        from counterpoint.transport.process.notify import Heartbeat, StatusLine, notify_ready
        from counterpoint.transport.telemetry.start_phases import OVER, enter

    command = parse("inference", InferenceConfig, arguments)
    if command is None:
        return 0
    enter("checks")
    require("an inference server", *SERVING)
    log_to_stderr()
    config = command.config.model_copy(update={"model": str(resolve_model(command.config.model))})
    heartbeat, status = Heartbeat(), StatusLine()
    doing = f"starting vLLM with {config.model}"
    status.show(doing)

    def on_ready() -> None:
        nonlocal doing
        doing = f"serving {config.model} on {config.scheme}://{config.host}:{config.port}"
        status.show(doing)
        enter(OVER)
        notify_ready()

    def beat(trouble: str, phase: str) -> None:
        heartbeat.report(trouble)
        status.show(trouble or (f"{doing}: {phase}" if phase else doing))
        if not trouble:  # without heartbeats, the supervisor restarts the server
            heartbeat.beat()

    with ReloadOnHangup(note_hangup):
        return serve(config, on_ready, beat, early)
