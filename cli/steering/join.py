"""`counterpoint join FILE`: starts a guest of a live job as a process of its own, and returns.

`counterpoint orchestrator FILE --join DIRECTORY` runs one in the foreground.
"""

from __future__ import annotations

from pathlib import Path

from cli.arguments.job import job_of
from cli.steering.arguments import parser_of, show
from job.admin.join import join_run
from transport.configuration.toml_file import read_portable_text


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError`."""
    parser = parser_of("join", "Starts a run of its own in a live job, detached from this terminal.", run=False)
    parser.add_argument("file", type=Path, metavar="FILE", help="the run's file, as of `counterpoint orchestrator`")
    parser.add_argument("--resume", action="store_true", help="go on with a run that has ended")
    given = parser.parse_args(arguments)
    joined = join_run(job_of(given), read_portable_text(given.file), name=str(given.file), resume=given.resume)
    return show(given, joined, f"run {joined.run_id} has joined (process {joined.pid}); its log: {joined.log}")
