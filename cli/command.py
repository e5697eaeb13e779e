"""What the commands that take a TOML file have in common: their arguments, their help, `--dry-run`."""

from __future__ import annotations

import logging
import textwrap
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic

from pydantic import BaseModel

from job.configuration.layers import Table, flag_path
from job.configuration.load import Model, load, read_toml, to_toml
from job.configuration.schema import ITEM, Key, keys_of, nearest, pattern_of
from job.errors import UserError

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
    """Parses `FILE [--switch] [--section.key value]...`, in any order. None after `--help` or `--dry-run`.

    `check` is given the command, and raises `UserError` as this does, also for a dry run. `values_of_job`, for a command that has
    `--join DIRECTORY`, gives what lies below the file's own values. `show` is what a dry run prints.
    """
    joins = values_of_job is not None
    keys = keys_of(model)
    words = _read(name, arguments, [*switches, "dry-run"], joins, keys)
    if words.help is not None:
        print(_help(name, keys, switches, joins, words.help))
        return None
    if words.file is None:
        raise UserError(f"{name}: which file?\n{_usage(name, switches, joins)}\n`counterpoint {name} --help` says more")
    file, join = Path(words.file), words.join
    try:
        below = values_of_job(join) if values_of_job is not None and join is not None else {}
        config = load(model, file, words.flags, below)
    except UserError:
        if (other := _whose(file, model)) is not None:
            kind, taker = other
            raise UserError(f"{file}: this is a {kind} file: use `counterpoint {taker} {file}`") from None
        raise
    chosen = frozenset(switch for switch in switches if switch in words.switches)
    command = Command(file, config, chosen, Path(join) if join is not None else None)
    check(command)
    if "dry-run" in words.switches:
        print(show(command), end="")
        return None
    return command


@dataclass(slots=True)
class _Words:
    """A parsed command line."""

    file: str | None = None
    switches: set[str] = field(default_factory=set)
    flags: list[str] = field(default_factory=list)
    """`--section.key=value`"""
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


def _whose(file: Path, model: type[BaseModel]) -> tuple[str, str] | None:
    """The kind of the file and the command for it, if its sections show that it is not a file of `model`."""
    from inference.config import InferenceConfig
    from job.config import JobConfig
    from job.sweep.targets import SweepConfig
    from run.config import RunConfig
    from trainer.config import TrainerConfig

    try:
        given = read_toml(file).keys()
    except UserError:
        return None
    if not given - model.model_fields.keys():
        return None
    kinds: dict[tuple[str, str], type[BaseModel]] = {
        ("job", "run"): JobConfig,
        ("trainer", "trainer"): TrainerConfig,
        ("orchestrator", "orchestrator"): RunConfig,
        ("server", "inference"): InferenceConfig,
        ("sweep", "sweep"): SweepConfig,
    }
    return next((kind for kind, other in kinds.items() if not given - other.model_fields.keys()), None)


def log_to_stderr() -> None:
    """For the roles that bring no logging of their own."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(message)s")


def _usage(name: str, switches: Sequence[str], joins: bool) -> str:
    flags = "".join(f" [--{switch}]" for switch in switches) + (" [--join DIRECTORY]" if joins else "")
    return f"usage: counterpoint {name} FILE{flags} [--dry-run] [--section.key VALUE]..."


def _help(name: str, keys: dict[str, Key], switches: Sequence[str], joins: bool, section: str) -> str:
    """Usage, and the keys of the file: those at the top and the sections, those of one section, or `all`. Raises `UserError`."""
    if section and section != "all" and not section.endswith(".toml"):
        return "\n".join(_keys_below(section, keys))
    lines = [_usage(name, switches, joins), ""]
    lines += [f"  --{switch:<10} {SWITCHES[switch]}" for switch in switches]
    lines += [f"  --join DIRECTORY  {JOIN}"] if joins else []
    lines += ["  --dry-run    print the resolved configuration and exit", "", "keys:"]
    if section == "all":
        return "\n".join([*lines, *(line for key in keys.values() for line in _about(key))])
    lines += [line for key in keys.values() if not key.is_section and "." not in key.path for line in _about(key)]
    sections = [key for key in keys.values() if key.is_section]
    width = max(len(_flag(key.path)) for key in sections) if sections else 0
    lines += ["", "sections (`--help SECTION` lists the keys of one and of those below it, `--help all` every key):"]
    lines += [f"  {_flag(key.path):<{width}}  {_first_sentence(key.description)}" for key in sections]
    return "\n".join(lines)


def _keys_below(section: str, keys: dict[str, Key]) -> list[str]:
    path = pattern_of(section.strip("[]").replace("-", "_"), keys).removesuffix(f".{ITEM}")
    found = [key for key in keys.values() if key.path == path or key.path.startswith(f"{path}.")]
    if not found:
        near = nearest(path, {name: key for name, key in keys.items() if key.is_section})
        advice = f"did you mean {_flag(near)}?" if near else "`--help` lists the sections"
        raise UserError(f"--help {section}: there is no such section; {advice}")
    return [line for key in found for line in _about(key)]


def _about(key: Key) -> list[str]:
    """A key as it can be typed, with its type, its default and its meaning."""
    if key.is_section:
        header = ["", f"  [{key.path.replace(f'.{ITEM}', '')}] {key.description}"]
        return [*header, f"  --{_flag(key.path)}  ({key.type}, as JSON)"] if key.type.startswith("list") else header
    default = f" = {key.default}" if key.default else ""
    meaning = textwrap.wrap(key.description, 120, initial_indent="      ", subsequent_indent="      ")
    return [f"  --{_flag(key.path)}  ({key.type}{default})", *meaning]


def _flag(path: str) -> str:
    """A key's path as written in a flag, with N for the position in a list (from 0)."""
    return path.replace(ITEM, "N")


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].rstrip(".")
