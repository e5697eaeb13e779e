"""`counterpoint show`: prints prompts, completions and rewards of a step's rollouts, from their records."""

from __future__ import annotations

import argparse

from counterpoint.cli.arguments.job import add_job, job_of
from counterpoint.cli.display.console import console_for
from counterpoint.cli.display.rollouts import print_rollout, rollout_table
from counterpoint.job.inspection.rollout_records import (
    best_record,
    find_run,
    find_step,
    read_records,
    record_of,
    records_without_difference,
    worst_record,
)
from counterpoint.transport.errors import UserError

PIPE_WIDTH = 240
"""Keeps each row of the table on one line."""


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError` if there is nothing to show."""
    given = _parser().parse_args(arguments)
    job = job_of(given)
    run_id = find_run(job, given.run)
    if given.no_difference:
        console = console_for(pipe_width=PIPE_WIDTH)
        for record in records_without_difference(job, run_id):
            print_rollout(console, f"run {run_id}, a group without a difference", record)
        return 0
    step = find_step(job, run_id, given.step)
    records = read_records(job, run_id, step)
    where, console = f"run {run_id}, step {step}", console_for(pipe_width=PIPE_WIDTH)
    if given.rollout is not None:
        chosen = record_of(records, given.rollout)
        if chosen is None:
            raise UserError(f"{where} has no rollout {given.rollout!r}; without --rollout all are listed")
    elif given.best or given.worst:
        chosen = best_record(records) if given.best else worst_record(records)
        if chosen is None:
            raise UserError(f"no rollout of {where} has a reward; without --best or --worst all are listed")
    else:
        console.print(rollout_table(where, list(records)))
        return 0
    print_rollout(console, where, chosen)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint show",
        description="Prints the prompts, completions and rewards of a step's rollouts: a line for each, or one in full.",
        allow_abbrev=False,
    )
    add_job(parser, positional=True)
    parser.add_argument("--step", type=int, metavar="N", help="the step (default: the newest)")
    parser.add_argument("--run", help="the run, if the job has several")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="print the rollout with the highest reward in full")
    which.add_argument("--worst", action="store_true", help="print the rollout with the lowest reward in full")
    which.add_argument(
        "--no-difference",
        action="store_true",
        help="print three of the worst rollouts of the groups that show no difference to learn from, while the run says so",
    )
    which.add_argument("--rollout", metavar="ID", help="print this rollout in full")
    return parser
