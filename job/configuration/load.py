"""Loads a configuration: defaults, then the TOML file, then `COUNTERPOINT_*` environment variables, then `--section.key` flags.

`job/configuration/layers.py` reads the latter two. This module merges and validates all. Its errors name the origin of the value,
its line in the file, the key, the value, what is allowed, and the nearest existing key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from job.configuration.layers import Table, entry_of, read_environment, read_flags, typed, variable
from job.configuration.lines import Lines, lines_of
from job.configuration.schema import ITEM, Key, keys_of, nearest, valid_keys
from job.errors import UserError

Model = TypeVar("Model", bound=BaseModel)


def load(model: type[Model], file: Path, flags: list[str], below: Table | None = None) -> Model:
    """Loads and validates a configuration.

    `flags` are `--section.key value` or `--section.key=value` words. The file and the other layers replace values of `below`.
    Raises `UserError` that lists all errors at once.
    """
    keys = keys_of(model)
    text = _read(file)
    layers = {
        str(file): _parse(text, file),
        "environment": read_environment(model, keys),
        "flags": read_flags(model, keys, flags),
    }
    merged: Table = below or {}
    for name, layer in layers.items():
        try:
            merged = merge(merged, layer)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
    return validate(model, merged, str(file), layers, text)


def validate(model: type[Model], values: Table, origin: str, layers: Mapping[str, Table] = {}, text: str = "") -> Model:
    """Makes the model of `values`.

    A value comes from `environment` or `flags` if that layer in `layers` has it, else from `origin`. `text` is the text of the
    file `origin`; errors quote its lines. Raises `UserError` that lists all errors at once.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        keys, every = keys_of(model), error.errors(include_url=False)
        homes = {_home(details, keys) for details in every}  # a key that is missing there stands in the wrong section
        places = {details["loc"] for details in every}
        reported = [
            one
            for one in every
            if (
                ".".join(map(str, one["loc"])) not in homes
                if one["type"] == "missing"
                else not _repeats(one, places, values)
            )
        ]
        lines = Lines(text)
        problems = [_explain(details, keys, origin, layers, lines) for details in reported]
        count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
        raise UserError(f"{count} in the configuration\n" + "\n".join(problems)) from None


def _repeats(details: ErrorDetails, places: set[tuple[int | str, ...]], values: Table) -> bool:
    """Whether the error concerns a value that was copied from the top of the file, where the same error is reported."""
    return details["loc"][1:] in places and not _holds(values, list(details["loc"]))


def read_toml(file: Path) -> Table:
    """Reads a file. Raises `UserError` for one that is missing, unreadable or malformed."""
    return _parse(_read(file), file)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{file}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None


def _parse(text: str, file: Path) -> Table:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file}: this is not TOML: {error}{_offending_line(text, str(error))}") from None


def to_toml(config: BaseModel) -> str:
    """Formats a configuration as a TOML file that loads to the same. Unset keys are left out: TOML has no null."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _offending_line(text: str, message: str) -> str:
    """The line that a TOML error names, quoted."""
    _, found, tail = message.partition("(at line ")
    number = tail.partition(",")[0]
    lines = lines_of(text)
    if not found or not number.isdigit() or int(number) > len(lines):
        return ""
    return f"\n  {number} | {lines[int(number) - 1]}"


def merge(below: Table, above: Table) -> Table:
    """Merges `above` into a copy of `below`: tables are merged, any other value is replaced.

    A table of positions (`job/configuration/layers.py`) changes entries of a list. Raises `UserError` for a position beyond the
    list's end.
    """
    merged = dict(below)
    for key, value in above.items():
        merged[key] = _overlaid(merged.get(key), value, str(key)) if isinstance(value, dict) else value
    return merged


def _overlaid(below: Any, above: Table, name: str) -> Any:
    if any(isinstance(key, int) for key in above):
        entries = list(below) if isinstance(below, list) else []
        for position, value in above.items():
            held = entry_of(entries, position, name)
            entries[position] = _overlaid(held, value, f"{name}[{position}]") if isinstance(value, dict) else value
        return entries
    return merge(below if isinstance(below, dict) else {}, above)


def _origin(path: list[str | int], origin: str, layers: Mapping[str, Table]) -> str:
    """The name of the highest layer that has the value."""
    dotted = ".".join(map(str, path))
    for layer, written in (("flags", f"--{dotted}"), ("environment", variable(dotted))):
        if path and _holds(layers.get(layer, {}), path):
            return written
    return origin


def _holds(table: Any, path: list[str | int]) -> bool:
    for part in path:
        held = range(len(table)) if isinstance(table, list) else table if isinstance(table, dict) else ()
        if part not in held:
            return False
        table = table[part]
    return True


def _explain(
    details: ErrorDetails, keys: dict[str, Key], origin: str, layers: Mapping[str, Table], lines: Lines
) -> str:
    """Describes one validation error."""
    location = _without_tags(list(details["loc"]), keys)
    shown = _show_path(location)
    pattern = ".".join(ITEM if isinstance(part, int) else part for part in location)
    is_section = isinstance(details["input"], dict)  # whose keys may come from several layers
    where = origin if is_section else _origin(location, origin, layers)
    quoted = ""
    if where == origin and (line := lines.of(location)) is not None:
        where, quoted = f"{origin}:{line.number}:{line.column}", f"\n    {line.number} | {line.text}"
    key = keys.get(pattern)
    if (home := _home(details, keys)) is not None:
        section, _, name = home.rpartition(".")
        written = (
            f"[[{home}]]" if keys[home].type == "list of tables" else f"[{home}]" if keys[home].is_section else name
        )
        below = "" if "[" in written else f" below [{section}]"
        return f"  {where}: {shown} belongs under [{section}]: write {written}{below}{quoted}"
    if details["type"] == "extra_forbidden":
        near = nearest(pattern, keys)
        numbers = ".".join(map(str, location))
        valid = ", ".join(valid_keys(pattern.rpartition(".")[0], keys))
        advice = f"the nearest is {_bracketed(typed(near, numbers))}" if near else f"valid: {valid}"
        return f"  {where}: {shown} = {_show(details['input'])}{quoted}\n    unknown key; {advice}"
    if details["type"] == "missing":
        what = f": {key.type}. {key.description}" if key else ""
        return f"  {where}: {shown} is required and not set{what}"
    message = _message(details)
    if not location:
        return f"  {where}: {message}"
    meaning = f"\n    {key.path.rpartition('.')[2]}: {key.description}" if key and key.description else ""
    if is_section:
        return f"  {where}: {shown}: {message}{quoted}"
    return f"  {where}: {shown} = {_show(details['input'])}{quoted}\n    {message}{meaning}"


def _message(details: ErrorDetails) -> str:
    context = details.get("ctx", {})
    match details["type"]:
        case "union_tag_invalid":
            name = context["discriminator"].strip("'")
            return f"{name} = {context['tag']!r} is not known; expected one of {context['expected_tags']}"
        case "path_type":
            return "expected a path, written as text"
        case "string_pattern_mismatch":
            return f"expected text that matches {context['pattern']}"
    return details["msg"].removeprefix("Value error, ").replace("Input should be", "expected")


def _home(details: ErrorDetails, keys: dict[str, Key]) -> str | None:
    """The full path of a section's key that stands at the top by mistake; None for any other error."""
    if details["type"] != "extra_forbidden" or len(details["loc"]) != 1:
        return None
    return next((key for key in keys if key.count(".") == 1 and key.partition(".")[2] == details["loc"][0]), None)


def _without_tags(location: list[str | int], keys: dict[str, Key]) -> list[str | int]:
    """Removes from a location the tags that pydantic adds for discriminated unions (`filters.0.gibberish.mode`)."""
    kept: list[str | int] = []
    for position, part in enumerate(location):
        pattern = ".".join(ITEM if isinstance(one, int) else one for one in [*kept, part])
        is_last = position == len(location) - 1
        is_prefix = any(key == pattern or key.startswith(f"{pattern}.") for key in keys)
        if isinstance(part, int) or is_last or is_prefix:
            kept.append(part)
    return kept


def _show_path(location: list[str | int]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _bracketed(path: str) -> str:
    return _show_path([int(part) if part.isdigit() else part for part in path.split(".")])


def _show(value: Any) -> str:
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 80 else f"{text[:77]}..."
