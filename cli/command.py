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
from cli.load import Model, load, to_toml
from cli.schema import ITEM, keys_of

SWITCHES = {
    "resume": "go on from the newest checkpoint",
    "fresh": "move what the output directory holds aside, and start anew",
}


@dataclass(frozen=True, slots=True)
class Command(Generic[Model]):
    """A command's parsed arguments."""

    file: Path
    config: Model
    switches: frozenset[str]
    """Those given, of the ones that the command has."""


def parse(
    name: str,
    model: type[Model],
    arguments: list[str],
    switches: Sequence[str] = (),
    check: Callable[[Model, frozenset[str]], None] = lambda config, switches: None,
) -> Command[Model] | None:
    """Parses `FILE [--switch] [--section.key value]...`. None when all was said by `--help` or `--dry-run`.

    `check` is given the configuration and the switches, and raises `UserError` as this does, also for a dry run.
    """
    if not arguments:
        raise UserError(f"{name}: which file?\n{_usage(name, switches)}\n`counterpoint {name} --help` lists every key")
    if arguments[0] in ("-h", "--help"):
        print(_help(name, model, switches))
        return None
    if arguments[0].startswith("-"):
        raise UserError(f"{name}: the file comes first: counterpoint {name} FILE {arguments[0]} ...")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for switch in (*switches, "dry-run", "help"):
        parser.add_argument(f"--{switch}", action="store_true")
    given, flags = parser.parse_known_args(arguments[1:])
    if given.help:
        print(_help(name, model, switches))
        return None
    if "resume" in switches and given.resume:
        flags += ["--resume", "true"]
    file = Path(arguments[0])
    config = load(model, file, flags)
    chosen = frozenset(switch for switch in switches if getattr(given, switch))
    check(config, chosen)
    if given.dry_run:
        print(to_toml(config), end="")
        return None
    return Command(file, config, chosen)


def log_to_stderr() -> None:
    """For the roles that bring no logging of their own."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(message)s")


def _usage(name: str, switches: Sequence[str]) -> str:
    flags = "".join(f" [--{switch}]" for switch in switches)
    return f"usage: counterpoint {name} FILE{flags} [--dry-run] [--section.key VALUE]..."


def _help(name: str, model: type[Model], switches: Sequence[str]) -> str:
    """Usage, and every key of the file with its type, default and meaning."""
    lines = [_usage(name, switches), ""]
    lines += [f"  --{switch:<10} {SWITCHES[switch]}" for switch in switches]
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
