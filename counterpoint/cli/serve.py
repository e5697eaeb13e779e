"""`counterpoint serve DIRECTORY...`: serves the web page and the admin API of jobs, until it is stopped."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from counterpoint.cli.arguments.command import log_to_stderr
from counterpoint.job.serving.config import ServeConfig
from counterpoint.transport.configuration.explain import validate
from counterpoint.transport.configuration.schema import keys_of
from counterpoint.transport.process.notify import notify_ready

DESCRIPTION = """Serves a web page and an API that show the jobs in DIRECTORY... and change them. Training never waits for it.
At the start it prints where it is, and which files hold the tokens."""


def main(arguments: list[str]) -> int:
    """Runs the command, until it is stopped; then ends the process with 0.

    A thread may wait for minutes for the answer of a run, or for ever for a disk: it must not hold up the end. A change that is
    cut off stands in the audit log without an end.
    """
    given = vars(_parser().parse_args(arguments))
    directories = given.pop("directories")
    values = {key: value for key, value in given.items() if value is not None}
    config = validate(ServeConfig, values, "serve")
    log_to_stderr()
    from counterpoint.serve.main import serve

    code = serve(directories, config, lambda text: print(text, flush=True), notify_ready)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="counterpoint serve", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("directories", type=Path, nargs="+", metavar="DIRECTORY", help="a job's output directory")
    for name, key in keys_of(ServeConfig).items():
        default = f" Default: {key.default}." if key.default not in ("", "unset", "[]") else ""
        meaning = f"{key.description}{default}".replace("%", "%%")
        kind: dict[str, Any] = {"dest": name, "help": meaning, "metavar": key.type.removeprefix("list of ").upper()}
        if name == "names":
            parser.add_argument("--name", action="append", **kind)
        else:
            parser.add_argument(f"--{name.replace('_', '-')}", **kind)
    return parser
