"""Loads the rows that a `DataConfig` describes. Blocks: an environment does so in its constructor, which runs in a thread.

rows = load_rows({"path": "train.jsonl", "columns": {"prompt": "question"}})
rows[3]["prompt"], rows.where(3), rows.fingerprint
"""

from __future__ import annotations

import glob
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from counterpoint.environments.data.config import DataConfig, parse_slice
from counterpoint.environments.data.json_lines import JsonLines
from counterpoint.environments.data.parquet import Parquet
from counterpoint.environments.data.rows import Chosen, DataError, Float64Array, JoinedRows, Listed, Rows, lacks

_SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet")


def load_rows(config: DataConfig | Mapping[str, Any]) -> Rows:
    """Returns the rows, at least one.

    Raises `DataError`, which names the file, line or key, what was found and what was expected.
    """
    if not isinstance(config, DataConfig):
        try:
            config = DataConfig.model_validate(config)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(["data", *map(str, first["loc"])])
            unknown = f"unknown key; valid: {', '.join(sorted(DataConfig.model_fields))}"
            message = unknown if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
            raise DataError(f"{where}: {message}") from error
    every = _source(config)
    rows = Chosen(every, range(len(every))[parse_slice(config.select)], config.columns)
    if not len(rows):
        raise DataError(
            f"data: select = {config.select!r} leaves no row of {len(every)}; expected at least one"
            if len(every)
            else f"data: {config.path or config.dataset or 'rows'} holds no row"
        )
    rows.row(0)  # It names a column that is missing, now and not during the run.
    if config.weight is not None:
        rows.weights = _weights(every[parse_slice(config.select)], config.weight)
    return rows


def _weights(rows: Rows, column: str) -> Float64Array:
    """Returns the weight of every row. Reads all of them. Raises `DataError`."""
    weights = np.empty(len(rows))
    for index, row in enumerate(rows):
        if column not in row:
            raise DataError(f"{rows.where(index)}: {lacks(column, list(row))} (`weight`)")
        value = row[column]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= sys.float_info.max:
            raise DataError(f"{rows.where(index)}: the weight {column!r} is {value!r}; expected a number, 0 or more")
        weights[index] = value
    return weights


def _source(config: DataConfig) -> Rows:
    if config.rows is not None:
        return Listed(config.rows)
    if config.dataset is not None:
        from counterpoint.environments.data.hub import dataset_rows

        return dataset_rows(config)
    assert config.path is not None
    try:
        parts = [_file(path, config) for path in _files(config.path)]
    except OSError as error:
        raise DataError(f"data: {error.filename or config.path}: {error.strerror or error}") from error
    return parts[0] if len(parts) == 1 else JoinedRows(parts)


def _files(pattern: str) -> list[Path]:
    """Returns the files of a path or pattern, in the order of their names."""
    if not glob.has_magic(pattern) or Path(pattern).exists():
        return [Path(pattern)]
    found = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    if not found:
        raise DataError(f"data: no file matches path = {pattern!r}, seen from {Path.cwd()}")
    return found


def _file(path: Path, config: DataConfig) -> Rows:
    if path.suffix not in _SUFFIXES:
        raise DataError(f"data: path = {str(path)!r}: the name ends with none of {', '.join(_SUFFIXES)}")
    if path.suffix == ".parquet":
        return Parquet(path, config.used_columns, config.max_row_bytes)
    return JsonLines(path, config.max_row_bytes)
