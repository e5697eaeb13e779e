"""`counterpoint bench [CASE...]`: measures, and says which bounds are kept (`perf/README.md` says how to read it).

Every case runs in a process of its own, so that none inherits another's memory or threads. `chaos` stands apart: it measures no
speed, takes most of an hour, and has its own arguments.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from cli.replay import console_for_tables
from cluster.process import guarded
from job.errors import UserError
from perf.bench.command import Size, add_arguments, size_of
from perf.figures import Case

CASES = {
    "step": "the step boundary, beside an idle loop, a copy of its bytes and the plain path",
    "send": "the sender, beside a bare ZMQ loop",
    "receive": "64 responses of 8 MB, beside a bare socket read",
    "schedule": "1,024 rollouts in flight (4,096 in full), beside the same loop with the openai client",
    "events": "the scheduler's time for an event, with 100 to 10,000 groups in progress",
    "garbage": "memory and pauses with an environment that makes reference cycles, beside Python's defaults",
    "memory": "peak and growth of resident size",
    "scaling": "from 0.1 to 1 GB (4 GB in full)",
    "multi-run": "training four runs at once, beside one with the same load, and the memory of each",
    "sweep": "claims a second of eight workers, beside bare flushed files; status of 10,000 targets",
}


CHAOS = "kill processes of a real job of several runs, round after round, and audit what is left (many minutes)"


def main(arguments: list[str]) -> int:
    """The command. Returns 1 when a bound is broken. A bound on time that other processes may have broken is not judged."""
    if arguments[:1] == ["chaos"]:
        command = [sys.executable, "-P", "-m", "perf.bench.chaos", *arguments[1:]]
        return subprocess.run(guarded(command), check=False).returncode
    given = _parser().parse_args(arguments)
    names = given.cases or list(CASES)
    for name in names:
        if name not in CASES:
            raise UserError(f"bench: there is no case {name!r}; there are: {', '.join(CASES)}")
    console = console_for_tables()
    cases: list[Case] = []
    failed = False
    for name in names:
        if not given.json:
            console.print(f"{name}: {CASES[name]}", highlight=False)
        try:
            measured = _measure(name, size_of(given))
        except CaseFailed as error:  # what the others take minutes to measure is not lost for it
            print(f"counterpoint: error: bench: {error}", file=sys.stderr)
            failed = True
            continue
        cases += measured
        if not given.json:
            for case in measured:
                console.print(case.as_table())
    noise = max((case.noise for case in cases if _undecided(case)), default=0.0)
    if noise:
        print(
            f"counterpoint: bench: other processes took up to {noise:.0%} of the machine's CPU; broken bounds on "
            "time are not judged in such cases. Run them again on a quiet machine",
            file=sys.stderr,
        )
    if given.json:
        print(json.dumps([case.as_json() for case in cases], indent=2))
    return int(failed or not all(case.held for case in cases))


def _undecided(case: Case) -> bool:
    return any(case.verdict(figure) == "too noisy to judge" for figure in case.figures)


class CaseFailed(RuntimeError):
    """A case ended without figures; its own words are on standard error already."""


def _measure(name: str, size: Size) -> list[Case]:
    """Raises `CaseFailed`."""
    module = f"perf.bench.{name.replace('-', '_')}"
    command = [sys.executable, "-P", "-m", module, "--json", *size.flags]
    completed = subprocess.run(guarded(command), stdout=subprocess.PIPE, text=True, check=False)
    try:
        return [Case.of_json(fields) for fields in json.loads(completed.stdout)]
    except (ValueError, KeyError):
        raise CaseFailed(f"the case {name} ended with {completed.returncode} and no figures") from None


def _parser() -> argparse.ArgumentParser:
    cases = "\n".join(f"  {name:<10} {summary}" for name, summary in CASES.items())
    parser = argparse.ArgumentParser(
        prog="counterpoint bench",
        description=f"Measures the daemon against its own bounds, each case in a process of its own.\n\ncases:\n{cases}\n\n"
        f"alone, and only when named:\n  {'chaos':<10} {CHAOS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="which (default: all of the first, in that order)")
    add_arguments(parser)
    return parser
