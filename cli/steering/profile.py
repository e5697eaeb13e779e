"""`counterpoint profile RUN`: samples what the run's event loop does, for a flame graph."""

from __future__ import annotations

from cli.steering.arguments import parser_of, show
from job.admin.profile import profile_loop


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError`."""
    parser = parser_of("profile", "Samples the event loop of a run's orchestrator a hundred times a second.")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="N", help="at most 300 (default: %(default)g)")
    given = parser.parse_args(arguments)
    profiled = profile_loop(given.job, given.run, given.seconds)
    return show(
        given,
        profiled,
        f"{profiled.seconds:g} s of run {profiled.run_id}\n  for https://www.speedscope.app: {profiled.speedscope}\n"
        f"  for flamegraph.pl: {profiled.collapsed}",
    )
