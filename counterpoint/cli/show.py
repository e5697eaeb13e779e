"""`counterpoint show`: prints prompts, completions and rewards of a step's rollouts, from their records."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from counterpoint.cli.arguments.job import add_job, job_of
from counterpoint.cli.display.console import console_for
from counterpoint.cli.display.rollouts import print_rollout, rollout_table
from counterpoint.job.reading.rollouts.rollout_records import (
    RolloutRecord,
    best_record,
    dropped_records,
    find_run,
    find_step,
    read_records,
    record_of,
    records_without_difference,
    worst_record,
)
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import published_steps

PIPE_WIDTH = 240
"""Keeps each row of the table on one line."""


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError` if there is nothing to show."""
    given = _parser().parse_args(arguments)
    job = job_of(given)
    run_id = find_run(job, given.run)
    console = console_for(pipe_width=PIPE_WIDTH)
    if given.no_difference:
        which, found = records_without_difference(job, run_id)
        for record in found:
            print_rollout(console, f"run {run_id}, {which}", record, tokens=given.tokens)
        return 0
    where, records = _records(job, run_id, given)
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
    print_rollout(console, where, chosen, tokens=given.tokens)
    return 0


def _records(job: Path, run_id: str, given: argparse.Namespace) -> tuple[str, Iterable[RolloutRecord]]:
    """Returns the records to choose from, and which they are. The newest that were dropped count as the newest step's."""
    dropped = dropped_records(job, run_id) if given.step is None else []
    if dropped and not published_steps(job / f"run_{run_id}" / "rollouts"):
        return f"run {run_id}, some of what was dropped before its first step", dropped
    step = find_step(job, run_id, given.step)
    records = read_records(job, run_id, step)
    if given.worst and dropped:
        return f"run {run_id}, step {step} and what was dropped since", chain(dropped, records)
    return f"run {run_id}, step {step}", records


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
    which.add_argument(
        "--worst", action="store_true", help="print the rollout with the lowest reward in full, of dropped groups, too"
    )
    which.add_argument(
        "--no-difference",
        action="store_true",
        help="print three of the worst rollouts of the groups whose rewards are all equal, so that nothing is learned from them",
    )
    which.add_argument("--rollout", metavar="ID", help="print this rollout in full")
    parser.add_argument(
        "--tokens", action="store_true", help="print prompts and completions with the tokens of the chat template"
    )
    return parser
