"""`counterpoint dump RUN`: waits for the run's next step, which is written in full for `counterpoint replay`."""

from __future__ import annotations

from cli.steering.arguments import parser_of, show
from job.admin.dump import DUMP_SECONDS, dump_next_step


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError`."""
    parser = parser_of("dump", "Has the next step of a run written in full, and waits for it.")
    parser.add_argument("--timeout", type=float, default=DUMP_SECONDS, metavar="SECONDS", help="default: %(default)g")
    given = parser.parse_args(arguments)
    dumped = dump_next_step(given.job, given.run, timeout=given.timeout)
    return show(given, dumped, f"step {dumped.step} of run {dumped.run_id}: {dumped.directory}")
