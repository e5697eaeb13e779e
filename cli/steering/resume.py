"""`counterpoint resume RUN`: a paused run goes on."""

from __future__ import annotations

from cli.steering.arguments import parser_of, show
from job.admin.pause import resume_run


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError`."""
    given = parser_of("resume", "Lets a paused run go on.").parse_args(arguments)
    resumed = resume_run(given.job, given.run)
    return show(given, resumed, f"run {resumed.run_id} goes on, after step {resumed.step}")
