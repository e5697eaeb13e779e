"""`counterpoint checkpoint RUN`: makes the run's newest step durable now."""

from __future__ import annotations

from cli.steering.arguments import parser_of, show
from job.admin.checkpoint import checkpoint_now


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError`."""
    given = parser_of("checkpoint", "Writes a checkpoint of the newest trained step, and keeps it.").parse_args(
        arguments
    )
    saved = checkpoint_now(given.job, given.run)
    return show(given, saved, f"step {saved.step} of run {saved.run_id} is durable: {saved.directory}")
