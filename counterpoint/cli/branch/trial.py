"""`counterpoint try RUN [KEY=VALUE ...] --tokens N`: tries a change inside a run, beside a branch without it."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import asdict

from counterpoint.cli.arguments.job import add_job, job_of
from counterpoint.cli.branch.branch import change_of, removal_of, step_of
from counterpoint.job.number_format import duration
from counterpoint.job.trial.ask import asked_of
from counterpoint.job.trial.conduct import conduct
from counterpoint.job.trial.decisions import TrialVerdict
from counterpoint.transport.printable import printable

UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError`."""
    given = _parser().parse_intermixed_args(arguments)  # --job may stand anywhere
    job, began = job_of(given), time.monotonic()
    changes = dict(map(change_of, given.changes))
    record, asked = asked_of(job, given.run, changes, given.tokens, step=given.step, evaluation=given.evaluation)
    verdict = conduct(
        job,
        record,
        asked,
        lambda words: print(printable(words), file=sys.stderr, flush=True),
        of_newest=given.step is None,
    )
    seconds = time.monotonic() - began
    values = {"try": record.name, "asked": asked.model_dump(), **asdict(verdict), "seconds": seconds}
    sentence = f"{_in_words(record.name, verdict, seconds)}\n{removal_of(job, [f'{record.name}-with', f'{record.name}-without'])}"
    print(json.dumps(values) if given.json else printable(sentence))
    return 0


def _in_words(name: str, found: TrialVerdict, seconds: float) -> str:
    compared = "nothing was compared"
    if (difference := found.difference) is not None:
        compared = (
            f"difference of held-out rewards {difference.estimate:+.4f}, 95 % interval {difference.low:+.4f} to "
            f"{difference.high:+.4f}, of {found.pairs:,} pairs in {found.passes} evaluations up to step {found.step}"
        )
    return f"{name}: {found.verdict}: {found.reason}; {compared}; {found.tokens:,} tokens, {duration(seconds)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint try",
        description="Tries a change inside a run of a live job: two branches of one of its steps, with the change and without "
        "it, are trained beside the run and compared on held-out examples, until the difference is certain or the tokens are "
        "used. The run itself stays as it is. The same command again goes on with a trial that was interrupted. Exit code 0: "
        "there is a verdict; 1: a branch could not go on; 2: a wrong call; 3: the step was not kept.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="the run that is branched")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="the change; none tries the run against itself")
    parser.add_argument(
        "--tokens", type=_tokens, required=True, metavar="N", help="of both branches, such as 500k or 2M"
    )
    parser.add_argument("--step", type=step_of, metavar="N", help="a kept step of the run (default: its newest one)")
    parser.add_argument("--evaluation", metavar="NAME", help="the one that compares (default: the run's first)")
    add_job(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")
    return parser


def _tokens(text: str) -> int:
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)([kMG]?)", text)
    count = 0 if found is None else int(float(found[1]) * UNITS[found[2]])
    if not count:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of tokens, such as 500k or 2M")
    return count
