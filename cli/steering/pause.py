"""`counterpoint pause RUN`: no group of the run starts until `counterpoint resume RUN`."""

from __future__ import annotations

from cli.steering.arguments import parser_of, show
from job.admin.pause import pause_run


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError`."""
    parser = parser_of("pause", "Pauses a run: what is in flight finishes, and nothing starts, over restarts, too.")
    parser.add_argument("--reason", default="", help="why, for people")
    given = parser.parse_args(arguments)
    paused = pause_run(given.job, given.run, given.reason)
    return show(given, paused, f"run {paused.run_id} is paused, after step {paused.step}")
