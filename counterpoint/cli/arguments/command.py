"""Parses the command lines of the commands that take a TOML file: file, switches, flags, `--help` and `--dry-run`."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic

from counterpoint.cli.arguments.help_text import help_of, usage_of
from counterpoint.job.configuration.layers import flag_path
from counterpoint.job.configuration.load import load, located, to_toml
from counterpoint.job.file_kind import other_kind
from counterpoint.transport.configuration.explain import Model
from counterpoint.transport.configuration.schema import Key, keys_of
from counterpoint.transport.configuration.toml_file import Table
from counterpoint.transport.errors import UserError
from counterpoint.transport.process.journal import formatter_for


@dataclass(frozen=True, slots=True)
class ParsedCommand(Generic[Model]):
    """A command's parsed arguments."""

    file: Path
    config: Model
    switches: frozenset[str]
    """The switches that were given, of those that the command has."""
    join: Path | None = None
    """The directory given with `--join`; None without it."""
    flags: tuple[str, ...] = ()
    """The flags that were given for keys, each as `--section.key=value`."""


def parse(
    name: str,
    model: type[Model],
    arguments: list[str],
    switches: Sequence[str] = (),
    check: Callable[[ParsedCommand[Model]], None] = lambda command: None,
    values_of_job: Callable[[str], Table] | None = None,
    show: Callable[[ParsedCommand[Model]], str] = lambda command: to_toml(command.config),
) -> ParsedCommand[Model] | None:
    """Parses `FILE [--switch] [--section.key value]...`, in any order. Returns None after `--help` or `--dry-run`.

    `check` checks the command, also before a dry run. `values_of_job`, for a command that has `--join DIRECTORY`, returns the
    values that the run takes from the job there; the file's own values replace them. `show` formats what a dry run prints.
    Raises `UserError`, as `check` may.
    """
    joins = values_of_job is not None
    keys = keys_of(model)
    words = _read(name, arguments, [*switches, "dry-run"], joins, keys)
    if words.help is not None:
        print(help_of(name, keys, switches, joins, words.help))
        return None
    if words.file is None:
        usage = usage_of(name, switches, joins)
        raise UserError(f"{name}: which file?\n{usage}\n`counterpoint {name} --help` says more")
    file, join = Path(words.file), words.join
    chosen = frozenset(switch for switch in switches if switch in words.switches)
    try:
        below = values_of_job(join) if values_of_job is not None and join is not None else {}
        config = load(model, file, words.flags, below)
    except UserError:
        if (other := other_kind(file, model)) is not None:
            kind, taker = other
            raise UserError(f"{file}: this is a {kind} file: use `counterpoint {taker} {file}`") from None
        raise
    command = ParsedCommand(file, config, chosen, Path(join) if join is not None else None, tuple(words.flags))
    try:
        check(command)
    except UserError as error:
        raise located(error, model, file, words.flags) if type(error) is UserError else error from None
    if "dry-run" in words.switches:
        print(show(command), end="", flush=True)
        print(f"{file}: ok", file=sys.stderr)
        return None
    return command


@dataclass(slots=True)
class _Words:
    """A parsed command line."""

    file: str | None = None
    switches: set[str] = field(default_factory=set)
    flags: list[str] = field(default_factory=list)
    """The flags in the form `--section.key=value`."""
    join: str | None = None
    help: str | None = None
    """The section after `--help`; empty without one."""


def _read(name: str, arguments: list[str], switches: Sequence[str], joins: bool, keys: dict[str, Key]) -> _Words:
    """Separates `FILE`, at any position, from the flags. Raises `UserError` for an unknown flag."""
    words, rest = _Words(), deque(arguments)
    while rest:
        word = rest.popleft()
        if not word.startswith("-"):
            if words.file is not None:
                raise UserError(
                    f"{name}: {word}: unexpected argument: the file is {words.file}, and flags begin with --"
                )
            words.file = word
            continue
        flag, separator, value = word.removeprefix("--").partition("=")
        flag = "help" if word == "-h" else flag
        switch = flag.replace("_", "-")
        if flag == "help":
            words.help = value or (rest[0] if rest and not rest[0].startswith("-") else "")
            return words
        if switch in switches:
            if not separator and rest and rest[0] in ("true", "false"):
                value = rest.popleft()
            if value not in ("", "true", "false"):
                raise UserError(f"{name}: {word}: expected true or false, or no value")
            words.switches = words.switches | {switch} if value != "false" else words.switches - {switch}
            if switch in keys:
                words.flags.append(f"--{switch}={value or 'true'}")
            continue
        path = flag if joins and flag == "join" else flag_path(word, keys, [*switches, "help", *["join"] * joins])
        if not separator:
            if not rest:
                raise UserError(f"{name}: {word}: a value must follow")
            value = rest.popleft()
        if joins and path == "join":
            words.join = value
        else:
            words.flags.append(f"--{path}={value}")
    return words


def log_to_stderr() -> None:
    """Sets up logging for the roles that have no logging of their own."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter_for(sys.stderr, logging.Formatter("%(asctime)s %(levelname)-7s %(message)s")))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
