"""Loads a configuration: defaults, then the TOML file, then `COUNTERPOINT_*` environment variables, then `--section.key` flags.

`counterpoint/job/configuration/layers.py` reads the latter two; paths of keys and tokens in them count from the working
directory. This module merges all; `transport/configuration/explain.py` validates the result, and explains what is wrong in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomli_w

from counterpoint.job.configuration.layers import entry_of, read_environment, read_flags, variable
from counterpoint.transport.config import Config
from counterpoint.transport.configuration.explain import Layer, Model, locate, validate
from counterpoint.transport.configuration.schema import keys_of
from counterpoint.transport.configuration.toml_file import Table, anchored, parse, read_text
from counterpoint.transport.errors import UserError


def load(model: type[Model], file: Path, flags: list[str], below: Table | None = None) -> Model:
    """Loads and validates a configuration.

    `flags` are `--section.key value` or `--section.key=value` words. The file and the other layers replace values of `below`.
    Raises `UserError` that lists all errors at once.
    """
    text = read_text(file)
    merged, above = _layers(model, file, text, flags, below)
    return validate(model, merged, str(file), above, text)


def located(error: UserError, model: type[Model], file: Path, flags: list[str]) -> UserError:
    """Returns an error of a check of the configuration that `load` made, with the line of the key that it begins with."""
    text = read_text(file)
    merged, above = _layers(model, file, text, flags, None)
    return UserError(locate(str(error), merged, str(file), above, text))


def to_toml(config: Config) -> str:
    """Formats a configuration as a TOML file that loads to the same."""
    return tomli_w.dumps(config.table())


def merge(below: Table, above: Table) -> Table:
    """Merges `above` into a copy of `below`: tables are merged, any other value is replaced.

    A table of positions (`counterpoint/job/configuration/layers.py`) changes entries of a list. Raises `UserError` for a position
    beyond the list's end.
    """
    merged = dict(below)
    for key, value in above.items():
        merged[key] = _overlaid(merged.get(key), value, str(key)) if isinstance(value, dict) else value
    return merged


def _layers(
    model: type[Model], file: Path, text: str, flags: list[str], below: Table | None
) -> tuple[Table, list[Layer]]:
    """All values, and the layers above the file, the highest first."""
    keys = keys_of(model)
    variables = anchored(read_environment(model, keys), Path.cwd())
    flagged = anchored(read_flags(model, keys, flags), Path.cwd())
    merged: Table = below or {}
    for name, layer in ((str(file), parse(text, file)), ("environment", variables), ("flags", flagged)):
        try:
            merged = merge(merged, layer)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
    return merged, [Layer(flagged, lambda path: f"--{path}"), Layer(variables, variable)]


def _overlaid(below: Any, above: Table, name: str) -> Any:
    if any(isinstance(key, int) for key in above):
        entries = list(below) if isinstance(below, list) else []
        for position, value in above.items():
            held = entry_of(entries, position, name)
            entries[position] = _overlaid(held, value, f"{name}[{position}]") if isinstance(value, dict) else value
        return entries
    return merge(below if isinstance(below, dict) else {}, above)
