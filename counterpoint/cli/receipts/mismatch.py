"""`counterpoint mismatch --step N`: splits the mismatch KL of a recorded step among its causes."""

from __future__ import annotations

import argparse
import json

from msgspec import convert

from counterpoint.cli.arguments.job import add_job
from counterpoint.cli.receipts.again import again
from counterpoint.cli.receipts.verify import run_of
from counterpoint.job.reading.rollouts.rollout_records import read_records, records_file


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError` for a step that cannot be computed again."""
    given = _parser().parse_args(arguments)
    job, run_id = run_of(given)
    with again(given, job, run_id, "computed") as (config, directory):
        from counterpoint.trainer.again.mismatch import PlayedRollout, split_step

        has_records = records_file(job, run_id, given.step).exists()
        records = read_records(job, run_id, given.step) if has_records else ()
        played = [convert(record.fields, PlayedRollout) for record in records]
        found = split_step(config, job, run_id, given.step, played, directory)
    print(json.dumps(found.values()) if given.json else found.text())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint mismatch",
        description="Splits the mismatch KL of a recorded step, between log-probabilities of servers and trainer: what "
        "staleness, the trainer's precision and kernels contribute, and which tokens stand out, such as those of one server. "
        "It loads the model, and trains again from a checkpoint of the trainer before the step. Exit code 4: the run is being "
        "written; 6: what it takes was not kept.",
        allow_abbrev=False,
    )
    add_job(parser, positional=True)
    parser.add_argument("--run", help="the run, if the job has several")
    parser.add_argument("--step", type=int, metavar="N", required=True, help="the step")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser
