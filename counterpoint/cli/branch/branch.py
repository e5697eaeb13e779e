"""`counterpoint branch RUN --step N --as NEW [KEY=VALUE ...]`: a run that goes on from a step of another one."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from counterpoint.cli.arguments.job import add_job, job_of
from counterpoint.job.branch import begin
from counterpoint.job.directory import is_running
from counterpoint.run.branches import BranchOrigin, origin_of
from counterpoint.transport.errors import UserError
from counterpoint.transport.printable import printable


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError`."""
    given = _parser().parse_intermixed_args(arguments)
    job, changes = job_of(given), dict(map(change_of, given.changes))
    config = begin.branch(job, given.run, given.step, given.name, changes, given.without, given.into)
    origin = origin_of(config.run_dir)
    assert origin is not None
    stays = given.prepare or given.into is not None
    joined = begin.start(job, config) if is_running(job) and not stays else None
    values = {"run_id": config.run_id, **origin.model_dump(exclude={"format"}), "pid": joined and joined.pid}
    sentence = f"run {config.run_id} goes on from step {origin.step} of run {origin.run}"
    left_out = _left_out(origin)
    if joined is not None:
        sentence += f" (process {joined.pid}){left_out}; its log: {joined.log}"
    else:
        sentence += f"{left_out}; to start it: {begin.start_words(job, config)}"
    print(json.dumps(values) if given.json else printable(sentence))
    return 0


def _left_out(origin: BranchOrigin) -> str:
    """Returns what is to be said of environments and examples that a branch leaves out of some steps alone."""
    played = [each for each in origin.without if not re.fullmatch(r"\d+-\d+", each)]
    if not played:
        return ""
    first, last = origin.without_from or 1, origin.step
    before = f", not of {_span(1, first - 1)}, which had been trained with it and cannot be again," if first > 1 else ""
    return f"; left out of {_span(first, last)}{before} and played on after step {last}: {', '.join(played)}"


def _span(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint branch",
        description="Begins a run with the state of another one after a step: weights, optimizer, schedule, place in the data. "
        "In a job that runs, it starts beside the others; with --into, it is the run of a new job. Exit code 2: a wrong call; "
        "3: the step was not kept.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="the run that it goes on from; it may have ended")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="keys of its configuration with other values")
    parser.add_argument("--step", type=step_of, metavar="N", help="a kept step of that run (default: its newest one)")
    parser.add_argument("--as", dest="name", required=True, metavar="NEW", help="the id of the new run")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="WHAT",
        help="leave out a rollout (12-3), an environment, or an example (ENVIRONMENT:INDEX) and train the steps since again",
    )
    parser.add_argument("--prepare", action="store_true", help="only prepare its directory, and say how to start it")
    parser.add_argument(
        "--into",
        type=Path,
        metavar="DIRECTORY",
        help="make it the only run of a new job in this new directory, with servers and trainer as this one has, and say how to "
        "start that",
    )
    add_job(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")
    return parser


def removal_of(job: Path, names: Iterable[str]) -> str:
    """Returns how to remove ended branches with these ids, and what the trainer has kept of them."""
    paths = [shlex.quote(str(path)) for name in names for path in (job / "trainer" / name, job / f"run_{name}")]
    return f"its branches stay on the disk; once none is needed: rm -r {' '.join(paths)}"


def step_of(text: str) -> int:
    """Returns the number of a step, or of steps. Raises `ArgumentTypeError`."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number, 1 or more")
    return int(text)


def change_of(word: str) -> tuple[str, str]:
    """Returns the key and the value of `KEY=VALUE`, as they are written. Raises `UserError`."""
    key, separator, value = word.partition("=")
    if not separator or not key:
        raise UserError(f"{word}: expected KEY=VALUE, such as training.learning_rate=2e-5")
    return key.removeprefix("--"), value
