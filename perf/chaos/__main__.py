"""Kills processes at random, round after round, and audits what is left. The exit code is 1 if something was lost or doubled.

python -m perf.chaos job|tinker|cluster|tune|sweep [--rounds N] [--seed 1] [--json] [--keep DIRECTORY]
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from perf.chaos.report import say
from perf.commands import PerfError

KINDS = {
    "job": ("perf.chaos.job", 30, "a job of three runs: orchestrators, trainer, vLLM; about a minute a round"),
    "tinker": (
        "perf.chaos.tinker_client",
        30,
        "a client of the Tinker SDK, service, trainer and vLLM; half a minute a round",
    ),
    "cluster": ("perf.chaos.cluster.chaos", 100, "the controller of a job of roles; half a minute a round"),
    "tune": ("perf.chaos.tune.chaos", 100, "experiments of the tuner; some seconds a round"),
    "sweep": ("perf.chaos.sweep_chaos", 100, "workers of a sweep; some seconds a round"),
}
"""The module of each kind, its rounds by default, and what it disturbs."""

PIPE_WIDTH = 110
"""The width of the table where output is no terminal."""


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, (name, rounds, summary) in KINDS.items():
        module = importlib.import_module(name)
        kind_parser = kinds.add_parser(kind, help=summary, description=module.__doc__)
        kind_parser.add_argument("--rounds", type=int, default=rounds, help="(default: %(default)s)")
        kind_parser.add_argument("--seed", type=int, default=1, help="of the random faults (default: %(default)s)")
        kind_parser.add_argument("--json", action="store_true", help="print JSON")
        kind_parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="keep the files there")
        if hasattr(module, "add_arguments"):
            module.add_arguments(kind_parser)
    given = parser.parse_args()
    directory = (given.keep or Path(tempfile.mkdtemp(prefix="chaos-"))).absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise PerfError(f"--keep {directory}: the directory is not empty")
        case = importlib.import_module(KINDS[given.kind][0]).measure(given, directory)
    except PerfError as error:
        say(f"error: {error}\nits files, if there are any, are in {directory}")
        return 1
    if not case.held:
        say(f"its files are in {directory}")
    elif given.keep is None:
        shutil.rmtree(directory)
    if given.json:
        print(json.dumps([case.as_json()], indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(case.as_table())
    return int(not case.held)


if __name__ == "__main__":
    sys.exit(main())
