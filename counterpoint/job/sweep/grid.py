"""Expands a sweep's file to its targets, each with an id: every combination of a grid's values, or the listed ones. Pure.

A target is a table of values by dotted paths, as in flags; a number in a path is a position in a list.
`counterpoint/job/sweep/targets.py` merges these values into those that all targets share.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from counterpoint.job.configuration.load import merge
from counterpoint.transport.configuration.toml_file import Table

DIGEST_CHARACTERS = 8
"""Length of the digest in an id that cannot show all its values."""


@dataclass(frozen=True, slots=True)
class Point:
    """One target: its id and its values."""

    target_id: str
    values: dict[str, Any]
    """The values by dotted path, in the file's order."""


def expand(grid: Table, zipped: Sequence[Table], listed: Sequence[Table], longest_id: int) -> list[Point]:
    """Returns the targets of `[grid]` and `[[zip]]`, or of `[[targets]]`.

    Each key of `grid` has a list of values. A table of `zipped` has lists of one length, whose values go together. The targets
    are all combinations, the last key changing fastest. `listed` has a table of values for each target. `longest_id` is in
    characters.

    Raises `ValueError` that names table, key and value: for no target, both ways at once, an empty list, lists of different
    lengths, a key given twice, or two targets with the same id.
    """
    if listed and (grid or zipped):
        raise ValueError(
            "[[targets]] lists single targets, [grid] and [[zip]] list values to combine: use one or the other"
        )
    if listed:
        settings = [_flat(table, f"targets[{position}]") for position, table in enumerate(listed)]
    else:
        settings = list(_combinations(grid, zipped))
    if not settings:
        raise ValueError("there is no target: give [grid] its lists of values, or list [[targets]]")
    points = [Point(id_of(values, longest_id), values) for values in settings]
    _check_ids(points)
    return points


def with_value_at(holder: Any, path: str, value: Any) -> Any:
    """Returns `holder` with `value` at a dotted path: tables are merged, any other value is replaced. Copies what it changes.

    Raises `ValueError` for a position beyond the end of a list.
    """
    name, _, rest = path.partition(".")
    if not path:
        both_tables = isinstance(holder, dict) and isinstance(value, dict)
        return merge(holder, value) if both_tables else value
    if not isinstance(holder, list):
        table = holder if isinstance(holder, dict) else {}
        return table | {name: with_value_at(table.get(name), rest, value)}
    if not name.isdigit() or int(name) >= len(holder):
        raise ValueError(f"it names entry {name!r} of a list with {len(holder)} entries, counted from 0")
    position = int(name)
    return [*holder[:position], with_value_at(holder[position], rest, value), *holder[position + 1 :]]


def id_of(values: Mapping[str, Any], longest: int) -> str:
    """Makes an id such as `learning_rate-0.001__seed-1`.

    It consists of the last part of each path (the whole path if two end alike) and of the values. Characters that a file's name
    cannot have, and those beyond `longest`, are left out; a digest of all values then follows. So targets with different values
    have different ids, and an id does not depend on the other targets.
    """
    names = [path.rpartition(".")[2] for path in values]
    labels = [name if names.count(name) == 1 else path for name, path in zip(names, values, strict=True)]
    whole = "__".join(f"{label}-{_text(value)}" for label, value in zip(labels, values.values(), strict=True))
    safe = re.sub(r"[^A-Za-z0-9_.]+", "-", whole).strip("-_.") if not _is_safe(whole) else whole
    is_unambiguous = whole.count("__") == len(values) - 1
    if safe == whole and is_unambiguous and len(safe) <= longest:
        return safe
    digest = hashlib.sha256(_canonical(dict(values)).encode()).hexdigest()[:DIGEST_CHARACTERS]
    return f"{safe[: longest - DIGEST_CHARACTERS - 1].rstrip('-_.')}.{digest}".lstrip(".")


def describe_values(values: Mapping[str, Any]) -> str:
    """Describes the values of a target: `training.learning_rate = 0.001, seed = 1`."""
    return ", ".join(f"{path} = {_text(value)}" for path, value in values.items())


def _combinations(grid: Table, zipped: Sequence[Table]) -> Iterator[dict[str, Any]]:
    """Every combination of the dimensions. Each key of the grid and each table of `zipped` is a dimension."""
    lists = _flat(grid, "grid") if grid else {}
    dimensions = [[{path: value} for value in _list(values, f"grid.{path}")] for path, values in lists.items()]
    for position, table in enumerate(zipped):
        columns = {
            path: _list(values, f"zip[{position}].{path}") for path, values in _flat(table, f"zip[{position}]").items()
        }
        if len({len(column) for column in columns.values()}) > 1:
            lengths = ", ".join(f"{path} has {len(column)}" for path, column in columns.items())
            raise ValueError(f"zip[{position}]: its lists must have the same length: {lengths}")
        dimensions.append([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])
    paths = [path for dimension in dimensions for path in dimension[0]]
    if twice := sorted({path for path in paths if paths.count(path) > 1}):
        raise ValueError(f"{twice[0]} is given twice, in [grid] and [[zip]] or in two of [[zip]]")
    if dimensions:
        for parts in itertools.product(*dimensions):
            yield {path: value for part in parts for path, value in part.items()}


def _flat(table: Table, where: str) -> dict[str, Any]:
    """The values of a table by dotted paths: TOML reads `training.learning_rate = 1` as nested tables. Raises `ValueError`."""
    if not table:
        raise ValueError(f"{where} is an empty table: it sets nothing")
    flat: dict[str, Any] = {}
    for key, value in table.items():
        inner = _flat(value, f"{where}.{key}") if isinstance(value, dict) else {"": value}
        for rest, leaf in inner.items():
            path = f"{key}.{rest}" if rest else key
            if path in flat:  # `"a.b" = 1` beside `a.b = 1`
                raise ValueError(f"{where}.{path} is given twice")
            flat[path] = leaf
    return flat


def _list(values: Any, where: str) -> list[Any]:
    if not isinstance(values, list):
        raise ValueError(f"{where} = {values!r}: expected a list of the values to try")
    if not values:
        raise ValueError(f"{where} = []: expected at least one value")
    return values


def _check_ids(points: Sequence[Point]) -> None:
    known: dict[str, Point] = {}
    for point in points:
        other = known.setdefault(point.target_id, point)
        if other is not point:
            raise ValueError(
                f"two targets have the id {point.target_id}: "
                f"one sets {describe_values(other.values)}, the other {describe_values(point.values)}"
            )


def _is_safe(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", text) is not None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _canonical(value)


def _canonical(value: Any) -> str:
    return json.dumps(value, default=str, separators=(",", ":"))  # JSON has no dates, TOML has
