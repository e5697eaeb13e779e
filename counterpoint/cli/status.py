"""`counterpoint status`: prints a job's state; with `--health`, says by its exit code whether it is alive."""

from __future__ import annotations

import argparse

from counterpoint.cli.arguments.job import add_job, job_of

WATCH_SECONDS = 2.0
"""Seconds between two updates of `--watch`."""

UNHEALTHY = 1
"""Exit code of `--health`."""


def main(arguments: list[str]) -> int:
    """Runs the command. Returns 0 also for a job that failed, since its status was printed, but for `--health`."""
    given = _parser().parse_args(arguments)
    directory = job_of(given)
    if given.health:  # every half minute, in a container: it imports little
        from counterpoint.job.reading.health import health_of

        health = health_of(directory)
        print("\n".join(health.faults or health.alive))
        return UNHEALTHY if health.faults else 0
    from counterpoint.cli.display import status_output

    if given.why is not None:
        status_output.print_why(directory, given.why, given.json)
    elif given.start:
        status_output.print_start(directory, given.json)
    elif given.watch:
        status_output.watch(directory, given.json, WATCH_SECONDS)
    else:
        status_output.print_once(directory, given.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint status",
        description="Prints a job's state from its output directory, also if its roles were started one by one.",
        allow_abbrev=False,
    )
    add_job(parser, positional=True)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object for programs; with --watch, one per line"
    )
    parser.add_argument("--watch", action="store_true", help=f"print again every {WATCH_SECONDS:g} s, until Ctrl-C")
    parser.add_argument(
        "--why",
        metavar="GROUP",
        help="print what happened to a group of rollouts (12, or a rollout of it: 12-3) and why it was dropped; `dropped` "
        "prints the newest dropped groups",
    )
    parser.add_argument(
        "--start",
        action="store_true",
        help="print what each process of the job did from the command to its first step, and for what it waited",
    )
    parser.add_argument(
        "--health",
        action="store_true",
        help="for a container's health check: exit with 0 if the runs that this machine plays there are alive and their event "
        "loops go on, else with 1, and print why",
    )
    return parser
