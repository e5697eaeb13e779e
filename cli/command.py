"""What the commands that take a TOML file have in common: their arguments, their help, `--dry-run`."""

from __future__ import annotations

import argparse
import logging
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from cli.errors import UserError
from cli.load import Model, Table, load, to_toml
from cli.schema import ITEM, keys_of

SWITCHES = {
    "resume": "go on from the newest checkpoint",
    "fresh": "move what the output directory holds aside, and start anew",
    "worker": "log what is done, without a table of the whole: for one machine of many",
}

JOIN = "take part in the job that runs there: its model, trainer and servers"


@dataclass(frozen=True, slots=True)
class Command(Generic[Model]):
    """A command's parsed arguments."""

    file: Path
    config: Model
    switches: frozenset[str]
    """Those given, of the ones that the command has."""
    join: Path | None = None
    """The directory given with `--join`, where the command has that."""


def parse(
    name: str,
    model: type[Model],
    arguments: list[str],
    switches: Sequence[str] = (),
    check: Callable[[Command[Model]], None] = lambda command: None,
    values_of_job: Callable[[str], Table] | None = None,
    show: Callable[[Command[Model]], str] = lambda command: to_toml(command.config),
) -> Command[Model] | None:
    """Parses `FILE [--switch] [--section.key value]...`. None when all was said by `--help` or `--dry-run`.

    `check` is given the command, and raises `UserError` as this does, also for a dry run. `values_of_job`, for a command that has
    `--join DIRECTORY`, gives what lies below the file's own values. `show` is what a dry run prints.
    """
    joins = values_of_job is not None
    if not arguments:
        raise UserError(
            f"{name}: which file?\n{_usage(name, switches, joins)}\n`counterpoint {name} --help` lists every key"
        )
    if arguments[0] in ("-h", "--help"):
        print(_help(name, model, switches, joins))
        return None
    if arguments[0].startswith("-"):
        raise UserError(f"{name}: the file comes first: counterpoint {name} FILE {arguments[0]} ...")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for switch in (*switches, "dry-run", "help"):
        parser.add_argument(f"--{switch}", action="store_true")
    if joins:
        parser.add_argument("--join")
    try:
        given, flags = parser.parse_known_args(arguments[1:])
    except argparse.ArgumentError as error:
        raise UserError(f"{name}: {error}") from None
    if given.help:
        print(_help(name, model, switches, joins))
        return None
    if "resume" in switches and given.resume:
        flags += ["--resume", "true"]
    file = Path(arguments[0])
    join = given.join if joins else None
    config = load(model, file, flags, values_of_job(join) if values_of_job is not None and join is not None else {})
    chosen = frozenset(switch for switch in switches if getattr(given, switch))
    command = Command(file, config, chosen, Path(join) if join is not None else None)
    check(command)
    if given.dry_run:
        print(show(command), end="")
        return None
    return command


def log_to_stderr() -> None:
    """For the roles that bring no logging of their own."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(message)s")


def _usage(name: str, switches: Sequence[str], joins: bool) -> str:
    flags = "".join(f" [--{switch}]" for switch in switches) + (" [--join DIRECTORY]" if joins else "")
    return f"usage: counterpoint {name} FILE{flags} [--dry-run] [--section.key VALUE]..."


def _help(name: str, model: type[Model], switches: Sequence[str], joins: bool) -> str:
    """Usage, and every key of the file with its type, default and meaning."""
    lines = [_usage(name, switches, joins), ""]
    lines += [f"  --{switch:<10} {SWITCHES[switch]}" for switch in switches]
    lines += [f"  --join DIRECTORY  {JOIN}"] if joins else []
    lines += ["  --dry-run    print the resolved configuration and exit", "", "keys:"]
    for path, key in keys_of(model).items():
        if key.is_section:
            lines += ["", f"  [{path.replace('.[]', '')}] {key.description}"]
            if key.type.startswith("list"):
                lines.append(f"  --{path}  ({key.type}, as JSON)")
        else:
            default = f" = {key.default}" if key.default else ""
            flag = path.replace(f".{ITEM}", ITEM) if ITEM in path else f"--{path}"  # no flag reaches into a list
            lines.append(f"  {flag}  ({key.type}{default})")
            lines += textwrap.wrap(key.description, 120, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)
