"""The help of the commands that take a TOML file: usage, switches, and the file's keys with their defaults."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from counterpoint.transport.configuration.schema import ITEM, Key, nearest, pattern_of
from counterpoint.transport.errors import UserError

SWITCHES = {
    "resume": "go on from the newest checkpoint",
    "fresh": "move what the output directory holds aside, and start anew",
    "keep-going": "never end a run because its first groups show no difference to learn from",
    "worker": "log what is done, without a table of the whole: for one machine of many",
}

JOIN = "take part in the job that runs there: its model, trainer and servers"

LINE_WIDTH = 120


def usage_of(name: str, switches: Sequence[str], joins: bool) -> str:
    """Returns the usage line of the command `name`. `joins`: whether it has `--join`."""
    flags = "".join(f" [--{switch}]" for switch in switches) + (" [--join DIRECTORY]" if joins else "")
    return f"usage: counterpoint {name} FILE{flags} [--dry-run] [--section.key VALUE]..."


def help_of(name: str, keys: dict[str, Key], switches: Sequence[str], joins: bool, section: str) -> str:
    """Returns the usage and the file's keys: those at the top and the sections, or the keys of one `section`, or of `all`.

    Raises `UserError` for an unknown section.
    """
    if section and section != "all" and not section.endswith(".toml"):
        return "\n".join(_keys_below(section, keys))
    lines = [usage_of(name, switches, joins), ""]
    lines += [f"  --{switch:<10} {SWITCHES[switch]}" for switch in switches]
    lines += [f"  --join DIRECTORY  {JOIN}"] if joins else []
    lines += ["  --dry-run    print the resolved configuration and exit", "", "keys:"]
    if section == "all":
        return "\n".join([*lines, *(line for key in keys.values() for line in _describe(key))])
    lines += [line for key in keys.values() if not key.is_section and "." not in key.path for line in _describe(key)]
    sections = [key for key in keys.values() if key.is_section and not _is_repeated(key, keys)]
    width = max(len(_flag(key.path)) for key in sections) if sections else 0
    lines += ["", "sections (`--help SECTION` lists the keys of one and of those below it, `--help all` every key):"]
    lines += [f"  {_flag(key.path):<{width}}  {_first_sentence(key.description)}" for key in sections]
    return "\n".join(lines)


def _is_repeated(key: Key, keys: dict[str, Key]) -> bool:
    """Whether a section of one of several runs is that of `[orchestrator]` once more."""
    below = f"runs.{ITEM}."
    return key.path.startswith(below) and f"orchestrator.{key.path.removeprefix(below)}" in keys


def _keys_below(section: str, keys: dict[str, Key]) -> list[str]:
    path = pattern_of(section.strip("[]").replace("-", "_"), keys).removesuffix(f".{ITEM}")
    found = [key for key in keys.values() if key.path == path or key.path.startswith(f"{path}.")]
    if not found:
        near = nearest(path, {name: key for name, key in keys.items() if key.is_section})
        advice = f"did you mean {_flag(near)}?" if near else "`--help` lists the sections"
        raise UserError(f"--help {section}: there is no such section; {advice}")
    return [line for key in found for line in _describe(key)]


def _describe(key: Key) -> list[str]:
    """A key as it can be typed, with its type, its default and its meaning."""
    if key.is_section:
        header = ["", f"  [{key.path.replace(f'.{ITEM}', '')}] {key.description}"]
        return [*header, f"  --{_flag(key.path)}  ({key.type}, as JSON)"] if key.type.startswith("list") else header
    default = f" = {key.default}" if key.default else ""
    meaning = textwrap.wrap(key.description, LINE_WIDTH, initial_indent="      ", subsequent_indent="      ")
    return [f"  --{_flag(key.path)}  ({key.type}{default})", *meaning]


def _flag(path: str) -> str:
    """A key's path as written in a flag, with N for the position in a list (from 0)."""
    return path.replace(ITEM, "N")


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].rstrip(".")
