"""`counterpoint verify`: checks a run's directory against its receipts; its exit code is the result."""

from __future__ import annotations

import argparse
import json
import re

from counterpoint.cli.arguments.job import add_job, job_of
from counterpoint.job.reading.rollouts.rollout_records import find_run
from counterpoint.verify.report import SOUND
from counterpoint.verify.run import verify


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError` if there is no such run."""
    given = _parser().parse_args(arguments)
    if given.step is not None:
        from counterpoint.cli.receipts.step import verify_step  # which needs the trainer

        return verify_step(given)
    job = job_of(given)
    run_dir = job if job.name.startswith("run_") and (job / "control").is_dir() else None
    report = verify(run_dir or job / f"run_{find_run(job, given.run)}", given.head)
    if given.json:
        print(json.dumps(report.values()))
    else:
        print(report.text())
    return report.code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint verify",
        description="Checks a run against its receipts: nothing is missing, doubled, reordered or altered, and each example was "
        f"trained as often as the order of data says. With --step it trains that step again, and compares. Exit code {SOUND}: "
        "sound; 1: damage; 3: no receipts; 4: the run is being written; 5: the chain of receipts is broken; 6: what it takes to "
        "train the step again was not kept.",
        allow_abbrev=False,
    )
    add_job(parser, positional=True)
    parser.add_argument("--run", help="the run, if the job has several")
    parser.add_argument(
        "--head",
        type=_head,
        metavar="HASH",
        help="the hash that was noted of the newest receipt; it pins all before it",
    )
    parser.add_argument("--step", type=int, metavar="N", help="train step N again, and compare")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def _head(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected 64 hexadecimal digits, the `head` of an earlier report")
    return text
