"""`counterpoint make-model NAME...`: builds a tiny model, or finds a hub model or a directory, and prints its directory.

The other commands resolve their model by it, too, in a process of its own, so that none of them carries torch along.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from cluster.process import SYSTEMD_VARIABLES, guarded
from job.errors import INTERRUPTED, UserError

USAGE = """usage: counterpoint make-model NAME...

NAME is a built-in model (tiny-moe, tiny-dense), a hub name or a directory. Prints one directory a line."""


def main(arguments: list[str]) -> int:
    """The command."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        from models.make_model import resolve_model
    except ModuleNotFoundError as error:
        raise UserError(f"making a model needs {error.name}; install the extra `cpu`, `gpu` or `train`") from None
    for name in arguments:
        try:
            print(resolve_model(name), flush=True)
        except ValueError as error:
            raise UserError(str(error)) from None
    return 0


def resolve(name: str) -> Path:
    """The directory of the model called `name`. Shows the building's progress on stderr.

    Ends this process (`SystemExit`), with the reason on stderr, when there is no such model or Ctrl-C interrupts.
    """
    if (Path(name) / "config.json").is_file():
        return Path(name).resolve()
    command = guarded([sys.executable, "-P", "-m", "cli.main", "make-model", name])
    environment = {key: value for key, value in os.environ.items() if key not in SYSTEMD_VARIABLES}
    try:
        completed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    except KeyboardInterrupt:
        print(
            f"\ncounterpoint: interrupted while the model {name} was found or built; nothing else was started. "
            "The same command begins again",
            file=sys.stderr,
        )
        raise SystemExit(INTERRUPTED) from None
    lines = completed.stdout.split("\n")
    directory = Path(lines[-2]) if len(lines) > 1 else Path()
    if completed.returncode != 0:
        raise SystemExit(completed.returncode)
    if not directory.is_dir():
        raise UserError(f"make-model {name} printed {str(directory)!r}, which is not a directory")
    return directory.resolve()
