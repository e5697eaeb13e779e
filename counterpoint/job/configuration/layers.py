"""Reads the layers that override a configuration's file: `COUNTERPOINT_*` variables and `--section.key value` flags.

pydantic-settings reads them, except values in a list's entry (`--environments.0.ratio 2`), which it does not support. Such a list
becomes a table whose keys are integers, which no file can contain. `counterpoint/job/configuration/load.py` merges the layers.
The library is imported when there is something to read: it takes a tenth of the CPU time of starting a command.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel, create_model

from counterpoint.environments.import_path import VARIABLE
from counterpoint.transport.configuration.schema import ITEM, Key, is_known, nearest, pattern_of, typed
from counterpoint.transport.configuration.toml_file import Table
from counterpoint.transport.errors import UserError
from counterpoint.transport.exact_json import is_deeper
from counterpoint.transport.files.untrusted import MAX_DEPTH

if TYPE_CHECKING:
    from pydantic_settings import BaseSettings

ENVIRONMENT_PREFIX = "COUNTERPOINT_"
NESTED_DELIMITER = "__"
LONGEST_SHOWN = 200
"""Characters of a value in a message."""
NOT_CONFIGURATION = frozenset({"COUNTERPOINT_CACHE", "COUNTERPOINT_REGION", "COUNTERPOINT_REGION_ROOT", VARIABLE})
"""Variables with our prefix that name no key: where `make-model` keeps its models, those of `counterpoint/sweep/regions.py`, and
what a guest may import."""


def forget_environment() -> dict[str, str]:
    """Removes our variables from the environment: a role's keys differ from a job's, and the role's file has their values.

    Returns what was removed.
    """
    return {name: os.environ.pop(name) for name in _variables()}


def without_configuration(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of a child whose file has all its keys: those of another role are no keys of it."""
    return {name: value for name, value in environment.items() if not _is_configuration(name)}


def read_environment(model: type[BaseModel], keys: dict[str, Key]) -> Table:
    """Reads the values that our variables set. Raises `UserError` for an unknown key or a malformed value."""
    if not _variables():
        return {}
    from pydantic_settings import EnvSettingsSource, SettingsError

    entries: dict[str, str] = {}
    for name in _variables():
        path = _path_of(name)
        if not is_known(path, keys):
            near = _with_other_delimiters(path, keys) or nearest(pattern_of(path, keys), keys)
            advice = f"; did you mean {variable(typed(near, path))}?" if near else ""
            raise UserError(f"environment variable {name}: there is no key {path}{advice}")
        _checked(f"environment variable {name}", keys.get(pattern_of(path, keys)), os.environ[name])
        if ITEM in pattern_of(path, keys):
            entries[name] = os.environ[name]
    try:
        source = EnvSettingsSource(
            _settings_of(model), env_prefix=ENVIRONMENT_PREFIX, env_nested_delimiter=NESTED_DELIMITER
        )
        reaching = {name.lower() for name in entries}
        source.env_vars = {name: text for name, text in source.env_vars.items() if name.lower() not in reaching}
        table: Table = source()
    except SettingsError as error:
        raise UserError(f"environment: {error} (a list or a table is written as JSON)") from None
    for name, text in entries.items():
        _put(table, _path_of(name), text, keys, f"environment variable {name}")
    return table


def read_flags(model: type[BaseModel], keys: dict[str, Key], flags: Sequence[str]) -> Table:
    """Reads the values that `--section.key value` and `--section.key=value` set. Raises as `read_environment`."""
    pairs = list(_pairs(flags, keys))
    if not pairs:
        return {}
    from pydantic_settings import CliSettingsSource, SettingsError

    for path, text in pairs:
        _checked(f"--{path}", keys.get(pattern_of(path, keys)), text)
    whole = [(path, text) for path, text in pairs if ITEM not in pattern_of(path, keys)]
    joined = [f"--{path}={text}" for path, text in whole]  # so that a value may begin with a dash
    try:
        table: Table = CliSettingsSource(_settings_of(model), cli_parse_args=joined, cli_exit_on_error=False)()
    except SettingsError as error:
        raise UserError(f"flags: {error} (a list or a table is written as JSON)") from None
    for path, text in pairs:
        if (path, text) not in whole:
            _put(table, path, text, keys, f"--{path}")
    return table


def flag_path(word: str, keys: dict[str, Key], switches: Iterable[str] = ()) -> str:
    """Returns the path of the key that a flag sets; dashes stand for underscores.

    Raises `UserError` for an unknown flag; the message names the nearest flag or switch of the command.
    """
    written = word.removeprefix("--").partition("=")[0]
    path = written if is_known(written, keys) else written.replace("-", "_")
    if is_known(path, keys):
        return path
    near = difflib.get_close_matches(written.replace("_", "-"), switches, n=1, cutoff=0.75)
    if not near and (key := nearest(pattern_of(path, keys), keys)):
        near = [typed(key, path)]
    raise UserError(f"{word}: there is no key {path}" + (f"; did you mean --{near[0]}?" if near else ""))


def variable(path: str) -> str:
    """Returns the name of the variable that sets a key."""
    return ENVIRONMENT_PREFIX + path.replace(".", NESTED_DELIMITER).upper()


def _variables() -> list[str]:
    return [name for name in os.environ if _is_configuration(name)]


def _is_configuration(name: str) -> bool:
    return name.startswith(ENVIRONMENT_PREFIX) and name not in NOT_CONFIGURATION


def _path_of(name: str) -> str:
    return name.removeprefix(ENVIRONMENT_PREFIX).lower().replace(NESTED_DELIMITER, ".")


def _settings_of(model: type[BaseModel]) -> type[BaseSettings]:
    """The model as a class of pydantic-settings."""
    from pydantic_settings import BaseSettings

    bases: Any = (model, BaseSettings)
    return cast(type[BaseSettings], create_model("Settings", __base__=bases))


def _with_other_delimiters(path: str, keys: dict[str, Key]) -> str | None:
    """The key that a variable names, if the number of underscores between section and key is ignored."""
    flat = {key.replace(".", "_"): key for key in keys if ITEM not in key}
    close = difflib.get_close_matches(path.replace(".", "_"), flat, n=1, cutoff=0.9)
    return flat[close[0]] if close else None


def _pairs(flags: Sequence[str], keys: dict[str, Key]) -> Iterable[tuple[str, str]]:
    words = iter(flags)
    for word in words:
        if not word.startswith("--"):
            raise UserError(f"{word}: unexpected; a flag is written --section.key value")
        path, (_, separator, value) = flag_path(word, keys), word.partition("=")
        following = value if separator else next(words, None)
        if following is None:
            raise UserError(f"{word}: a value must follow")
        yield path, following


def _put(table: Table, path: str, text: str, keys: dict[str, Key], origin: str) -> None:
    """Sets the value at `path`.

    An entry of a list is changed in the table's own list if it has one, else, by position, in the list of a layer below.
    """
    pattern = pattern_of(path, keys)
    parts: list[Any] = [
        int(part) if kind == ITEM else part for part, kind in zip(path.split("."), pattern.split("."), strict=True)
    ]
    holder: Any = table
    for depth, part in enumerate(parts[:-1], start=1):
        holder = entry_of(holder, part, origin) if isinstance(holder, list) else holder.setdefault(part, {})
        is_list = isinstance(parts[depth], int)
        if not isinstance(holder, dict | list if is_list else dict):
            above, expected = ".".join(map(str, parts[:depth])), "a list" if is_list else "a table"
            raise UserError(f"{origin}: {above} = {holder!r}; expected {expected}")
    holder[parts[-1]] = _value(keys.get(pattern), text, origin)


def entry_of(entries: Sequence[Any], position: int, name: str) -> Any:
    """Returns an entry of a list. Raises `UserError` if the list is too short."""
    if position >= len(entries):
        count = "1 entry" if len(entries) == 1 else f"{len(entries)} entries"
        raise UserError(f"{name} has {count}; there is no entry {position} (the first is 0)")
    return entries[position]


def _value(key: Key | None, text: str, origin: str) -> Any:
    value = _checked(origin, key, text)
    return value if key is None or _is_json(key) else None if text == "null" else text


def _checked(origin: str, key: Key | None, text: str) -> Any:
    """Returns what `text` is as JSON, or `text`. Raises `UserError` for a list or a table that is not JSON, or too deep."""
    try:
        value = json.loads(text)
        too_deep = is_deeper(value, MAX_DEPTH)
    except RecursionError:
        too_deep = True
    except ValueError as error:  # text; or an integer of more digits than Python reads
        is_word = isinstance(error, json.JSONDecodeError) and (key is None or not _is_json(key))
        if is_word:
            return text
        what = f"; expected {key.type}, written as JSON" if key is not None else ""
        raise UserError(f"{origin} = {_shown(text)}\n    this is not JSON: {error}{what}") from None
    if too_deep:
        raise UserError(f"{origin} = {_shown(text)}\n    it has tables or arrays more than {MAX_DEPTH} deep")
    return value


def _shown(text: str) -> str:
    return repr(text) if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]!r}..."


def _is_json(key: Key) -> bool:
    return key.is_section or key.is_free or key.type.startswith("list")
