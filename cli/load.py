"""Loads a configuration: defaults, then the TOML file, then `COUNTERPOINT_*` environment variables, then `--section.key` flags.

The layers are read by pydantic-settings' own sources; here they are merged and validated, and what is wrong is told in words a
person can act on: where the value came from, the key, the value, what is allowed, and the nearest key that exists.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import tomli_w
from pydantic import BaseModel, ValidationError, create_model
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliSettingsSource, EnvSettingsSource, SettingsError

from cli.errors import UserError
from cli.schema import ITEM, Key, keys_of, nearest, valid_keys

ENVIRONMENT_PREFIX = "COUNTERPOINT_"
NESTED_DELIMITER = "__"
NOT_CONFIGURATION = frozenset({"COUNTERPOINT_CACHE"})
"""Variables with our prefix that are no key of a file: where `make-model` keeps what it builds."""

Model = TypeVar("Model", bound=BaseModel)
Table = dict[str, Any]


def load(model: type[Model], file: Path, flags: list[str], below: Table | None = None) -> Model:
    """The validated configuration. `flags` are `--section.key value` or `--section.key=value` words; the values of `below` count
    where nothing else sets them.

    Raises `UserError` that lists everything wrong at once.
    """
    keys = keys_of(model)
    from_file = read_toml(file)
    settings = _settings_of(model)
    layers = {
        str(file): from_file,
        "environment": _read_environment(settings, keys),
        "flags": _read_flags(settings, keys, flags),
    }
    merged: Table = below or {}
    for layer in layers.values():
        merged = merge(merged, layer)
    return validate(model, merged, str(file), layers)


def validate(model: type[Model], values: Table, origin: str, layers: Mapping[str, Table] = {}) -> Model:
    """The model of `values`, which come from `origin` unless a layer above it, `environment` or `flags`, has them.

    Raises `UserError` that lists everything wrong at once.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        keys, every = keys_of(model), error.errors(include_url=False)
        homes = {_home(details, keys) for details in every}  # what is missing there is what stands elsewhere
        told = [one for one in every if one["type"] != "missing" or ".".join(map(str, one["loc"])) not in homes]
        problems = [_explain(details, keys, origin, layers) for details in told]
        count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
        raise UserError(f"{count} in the configuration\n" + "\n".join(problems)) from None


def read_toml(file: Path) -> Table:
    """The file's content. Raises `UserError` for one that is missing, unreadable or malformed."""
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{file}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file}: this is not TOML: {error}{_offending_line(text, str(error))}") from None


def to_toml(config: BaseModel) -> str:
    """A resolved configuration as a file that loads to the same; keys that are unset have no place in TOML."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def forget_environment() -> None:
    """Drops our variables from the environment: a role has other keys than a job, and its file holds what it needs."""
    for name in _variables():
        del os.environ[name]


def _variables() -> list[str]:
    return [name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX) and name not in NOT_CONFIGURATION]


def _settings_of(model: type[BaseModel]) -> type[BaseSettings]:
    """The model as pydantic-settings wants it."""
    bases: Any = (model, BaseSettings)
    return cast(type[BaseSettings], create_model("Settings", __base__=bases))


def _offending_line(text: str, message: str) -> str:
    """The line that a TOML error names, quoted."""
    _, found, tail = message.partition("(at line ")
    number = tail.partition(",")[0]
    lines = text.splitlines()
    if not found or not number.isdigit() or int(number) > len(lines):
        return ""
    return f"\n  {number} | {lines[int(number) - 1]}"


def _read_environment(settings: type[BaseSettings], keys: dict[str, Key]) -> Table:
    for name in _variables():
        path = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace(NESTED_DELIMITER, ".")
        if not _is_known(path, keys):
            near = _with_other_delimiters(path, keys) or nearest(path, keys)
            advice = f"; did you mean {_variable(near)}?" if near else ""
            raise UserError(f"environment variable {name}: there is no key {path}{advice}")
    try:
        source = EnvSettingsSource(settings, env_prefix=ENVIRONMENT_PREFIX, env_nested_delimiter=NESTED_DELIMITER)
        return source()
    except SettingsError as error:
        for name in _variables():
            path = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace(NESTED_DELIMITER, ".")
            _require_json(f"environment variable {name}", keys.get(path), os.environ[name])
        raise UserError(f"environment: {error} (a list or a table is written as JSON)") from None


def _with_other_delimiters(path: str, keys: dict[str, Key]) -> str | None:
    """The key that a variable names apart from how many underscores stand between section and key."""
    flat = {key.replace(".", "_"): key for key in keys if ITEM not in key}
    close = difflib.get_close_matches(path.replace(".", "_"), flat, n=1, cutoff=0.9)
    return flat[close[0]] if close else None


def _require_json(origin: str, key: Key | None, value: str) -> None:
    """Raises `UserError` for a list or a table that is not written as one."""
    if key is None or not (key.is_section or key.is_free or key.type.startswith("list")):
        return
    try:
        json.loads(value)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{origin} = {_show(value)}\n    this is not JSON: {error}; expected {key.type}, written as JSON"
        ) from None


def _read_flags(settings: type[BaseSettings], keys: dict[str, Key], flags: list[str]) -> Table:
    expect_value = False
    for word in flags:
        if expect_value:
            expect_value = False
            continue
        path, separator, _ = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            raise UserError(f"{word}: unexpected; a flag is written --section.key value")
        if not _is_known(path, keys):
            near = nearest(path, keys)
            raise UserError(f"{word}: there is no key {path}" + (f"; did you mean --{near}?" if near else ""))
        expect_value = not separator
    if expect_value:
        raise UserError(f"{flags[-1]}: a value must follow")
    joined = [f"{flag}={value}" for flag, value in _pairs(flags)]  # so that a value may begin with a dash
    try:
        return CliSettingsSource(settings, cli_parse_args=joined, cli_exit_on_error=False)()
    except SettingsError as error:
        for flag, value in _pairs(flags):
            _require_json(flag, keys.get(flag.removeprefix("--")), value)
        raise UserError(f"flags: {error} (a list or a table is written as JSON)") from None


def _pairs(flags: list[str]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    words = iter(flags)
    for word in words:
        flag, separator, value = word.partition("=")
        pairs.append((flag, value if separator else next(words)))
    return pairs


def _is_known(path: str, keys: dict[str, Key]) -> bool:
    """Whether a flag or a variable may set `path`: a key, or anything below one that holds a free table."""
    if path in keys:
        return True
    parts = path.split(".")
    above = [".".join(parts[:length]) for length in range(1, len(parts))]
    return any(key in keys and keys[key].is_free for key in above)


def merge(below: Table, above: Table) -> Table:
    """`above` over `below`: tables are merged, anything else is replaced."""
    merged = dict(below)
    for key, value in above.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both_tables else value
    return merged


def _variable(path: str) -> str:
    return ENVIRONMENT_PREFIX + path.replace(".", NESTED_DELIMITER).upper()


def _origin(path: list[str | int], origin: str, layers: Mapping[str, Table]) -> str:
    """Which layer a value came from: the highest that holds it."""
    dotted = ".".join(map(str, path))
    for layer, written in (("flags", f"--{dotted}"), ("environment", _variable(dotted))):
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


def _explain(details: ErrorDetails, keys: dict[str, Key], origin: str, layers: Mapping[str, Table]) -> str:
    """One validation error for a person."""
    location = _without_tags(list(details["loc"]), keys)
    shown = _show_path(location)
    pattern = ".".join(ITEM if isinstance(part, int) else part for part in location)
    is_section = isinstance(details["input"], dict)  # whose keys may come from several layers
    origin = origin if is_section else _origin(location, origin, layers)
    key = keys.get(pattern)
    if (home := _home(details, keys)) is not None:
        section, _, name = home.rpartition(".")
        written = (
            f"[[{home}]]" if keys[home].type == "list of tables" else f"[{home}]" if keys[home].is_section else name
        )
        return f"  {origin}: {shown} belongs under [{section}]: write {written}{'' if '[' in written else f' below [{section}]'}"
    if details["type"] == "extra_forbidden":
        near = nearest(pattern, keys)
        section = pattern.rpartition(".")[0]
        advice = (
            f"the nearest is {near.replace('.' + ITEM, ITEM)}"
            if near
            else f"valid: {', '.join(valid_keys(section, keys))}"
        )
        return f"  {origin}: {shown} = {_show(details['input'])}\n    unknown key; {advice}"
    if details["type"] == "missing":
        what = f": {key.type}. {key.description}" if key else ""
        return f"  {origin}: {shown} is required and not set{what}"
    message = details["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    if not location:
        return f"  {origin}: {message}"
    meaning = f"\n    {key.path.rpartition('.')[2]}: {key.description}" if key and key.description else ""
    if is_section:
        return f"  {origin}: {shown}: {message}"
    return f"  {origin}: {shown} = {_show(details['input'])}\n    {message}{meaning}"


def _home(details: ErrorDetails, keys: dict[str, Key]) -> str | None:
    """Where a key belongs that stands at the top and is one of a section's; None for any other error."""
    if details["type"] != "extra_forbidden" or len(details["loc"]) != 1:
        return None
    return next((key for key in keys if key.count(".") == 1 and key.partition(".")[2] == details["loc"][0]), None)


def _without_tags(location: list[str | int], keys: dict[str, Key]) -> list[str | int]:
    """pydantic puts the tag of a discriminated union into a location (`filters.0.gibberish.mode`); the file has no such key."""
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


def _show(value: Any) -> str:
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 80 else f"{text[:77]}..."
