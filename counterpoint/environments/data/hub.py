"""Rows of a dataset of the hub or of a directory, by the library `datasets` (extra), which finds and maps its files.

It looks on the hub unless HF_HUB_OFFLINE=1 is set, and never runs a dataset's own code: what is loaded is data files alone.

The library guesses types where a file has none: 7 beside 2.5 becomes 7.0, texts that look like dates become timestamps, "007" an
integer, "NA" nothing. So files of JSON are read here, as by `path`, and every value of a CSV file is text. Of what was guessed
before, or of other such files, what may have changed is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from counterpoint.environments.data.arrow_values import ArrowValues
from counterpoint.environments.data.config import DataConfig
from counterpoint.environments.data.json_lines import JsonLines
from counterpoint.environments.data.rows import Chosen, DataError, JoinedRows, Row, Rows, digest, lacks
from counterpoint.transport.exact_json import dumps

_HASHED_ROWS = 1000
"""Rows that the fingerprint is of, evenly spaced: a digest of a large dataset would take minutes."""
_MARKERS = ("state.json", "dataset_dict.json")
"""Files of a directory that `Dataset.save_to_disk` and `DatasetDict.save_to_disk` wrote."""
_TYPED = {None, "arrow", "hdf5", "iceberg", "lance", "parquet", "text", "vortex"}
"""The library's readers of files that have types, and None for what a program made. All others guess."""


def dataset_rows(config: DataConfig) -> Rows:
    """Returns the rows of one split, from the network if they are not here. Blocks. Raises `DataError`."""
    name, split = f"dataset {config.dataset}", config.split or "train"
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{name} needs the extra `datasets`: pip install 'counterpoint[datasets]' ({error})") from error
    assert config.dataset is not None
    datasets.disable_progress_bars()
    directory = Path(config.dataset)
    try:
        if any((directory / marker).is_file() for marker in _MARKERS):
            found = _saved(datasets.load_from_disk(str(directory)), config, name)
            return HubRows(found, config, name, _guesser(found.info.builder_name))
        where: dict[str, Any] = {"path": config.dataset, "name": config.subset, "revision": config.revision}
        builder = datasets.load_dataset_builder(**where)
        kind, settings = builder.info.builder_name, builder.config
        if kind != "csv" and any(Path(each).name == "metadata.csv" for each in _named_files(settings)):
            raise DataError(
                f"{name}: the library `datasets` guesses what the values of its metadata.csv are ('007' would be 7): make it "
                "metadata.jsonl, by which each has its type"
            )
        if kind == "json" and settings.data_files:  # without, they are files that the library has read before
            return _json_rows(datasets, builder, split, config.max_row_bytes)
        has_types = getattr(settings, "features", None) is not None
        if kind == "csv" and settings.data_files and not has_types:
            text = datasets.Features(dict.fromkeys(_csv_columns(datasets, builder), datasets.Value("string")))
            builder = datasets.load_dataset_builder(**where, features=text, keep_default_na=False)
            has_types = True
        builder.download_and_prepare()
        return HubRows(builder.as_dataset(split=split), config, name, None if has_types else _guesser(kind))
    except DataError:
        raise
    except Exception as error:  # the library raises whatever its readers, fsspec and the network do
        offline = " (HF_HUB_OFFLINE is set)" if datasets.config.HF_HUB_OFFLINE else ""
        problem = f"{type(error).__name__}: {error.__cause__ or error}"
        raise DataError(f"{name}, split {split!r}, cannot be loaded{offline}: {problem}") from error


class HubRows(Rows):
    """The rows of a dataset that the library has read."""

    def __init__(self, found: Any, config: DataConfig, name: str, guesser: str | None) -> None:
        """`guesser`: the reader of the library that guessed the types, if one did. Raises `DataError`."""
        self._name = name
        columns = config.used_columns
        for column in columns:
            if column not in found.column_names:
                raise DataError(f"{name}: {lacks(column, found.column_names)}")
        used = found.select_columns(columns) if columns else found
        self._dataset = used.with_format("arrow")  # images stay bytes: nothing is decoded on the event loop
        schema = self._dataset.features.arrow_schema
        self._values = ArrowValues(schema, name)
        self._guesser = guesser
        for field in schema if guesser else ():
            if "timestamp[" in str(field.type):
                raise DataError(
                    f"{name}: the library `datasets` has made the texts of the column {field.name!r} of {guesser} files "
                    f"{field.type}. {_ADVICE}"
                )
        self._max_row_bytes = config.max_row_bytes

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def fingerprint(self) -> str:
        """See `Rows`: of the number of rows, the columns, and up to `_HASHED_ROWS` rows."""
        step = max(1, len(self) // _HASHED_ROWS)
        rows = [self._dataset[index].to_pylist() for index in range(0, len(self), step)]
        return digest(dumps([len(self), self._dataset.column_names, rows], default=repr))

    def row(self, index: int) -> Row:
        """See `Rows`."""
        table = self._dataset[index]
        if table.nbytes > self._max_row_bytes:
            raise DataError(
                f"{self.where(index)}: it has {table.nbytes} bytes; expected at most max_row_bytes = {self._max_row_bytes}"
            )
        row = self._values.row(table, self.where(index))
        if self._guesser and (number := next(_whole_floats(row), None)) is not None:
            raise DataError(
                f"{self.where(index)}: the library `datasets` has read a number of {self._guesser} files as {number!r}, which "
                f"may be an integer there. {_ADVICE}"
            )
        return row

    def where(self, index: int) -> str:
        """See `Rows`."""
        return f"{self._name}, row {index}"


_ADVICE = (
    "Name the files themselves, as path, or their directory, by which each value is read as it is written; or leave the column "
    "out, with `columns`"
)


def _guesser(reader: str | None) -> str | None:
    return None if reader in _TYPED else reader


def _whole_floats(value: Any) -> Iterator[float]:
    """Yields the floats in a value that may have been integers."""
    if isinstance(value, float):
        if value.is_integer():
            yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _whole_floats(each)


def _saved(found: Any, config: DataConfig, name: str) -> Any:
    """Returns the split of what was saved. Raises `DataError`."""
    if isinstance(found, dict):
        split = config.split or "train"
        if split not in found:
            raise DataError(f"{name} has no split {split!r}; it has {', '.join(map(repr, found))}")
        return found[split]
    if config.split is not None:
        raise DataError(f"{name} was saved as one split; leave out split = {config.split!r}, or use select")
    return found


def _named_files(settings: Any) -> Iterator[str]:
    for files in (getattr(settings, "data_files", None) or {}).values():
        yield from files


def _files(datasets: Any, builder: Any) -> dict[str, list[str]]:
    """Returns the files of each split, on this machine and unpacked."""
    manager = datasets.DownloadManager(
        dataset_name=builder.dataset_name,
        download_config=datasets.DownloadConfig(token=builder.token, storage_options=builder.storage_options),
        base_path=builder.base_path,
    )
    found = manager.download_and_extract(builder.config.data_files)
    return {str(split): list(manager.iter_files(files)) for split, files in found.items()}


def _json_rows(datasets: Any, builder: Any, split: str, max_row_bytes: int) -> Rows:
    """Returns the rows of a split of JSON files, each as `path` reads it. Raises `DataError`, `OSError`, `ValueError`."""
    for key, usual in (("field", None), ("encoding", "utf-8")):
        if (given := getattr(builder.config, key)) != usual:
            raise DataError(f"dataset {builder.dataset_name}: its card says {key} = {given!r}, which is not read")
    files = _files(datasets, builder)
    spec = "+".join(files) if split == "all" else split
    rows = {
        name: JoinedRows([JsonLines(Path(file), max_row_bytes) for file in paths])
        for name, paths in files.items()
        if name in {re.split(r"[\[(]", part)[0].strip() for part in spec.split("+")}
    }
    lengths = {name: len(each) for name, each in rows.items()}
    missing = {name: 0 for name in files if name not in lengths}
    chosen = datasets.ReadInstruction.from_spec(spec).to_absolute(lengths | missing)
    parts = [Chosen(rows[each.splitname], range(each.from_, each.to), {}) for each in chosen]
    return parts[0] if len(parts) == 1 else JoinedRows(parts)


def _csv_columns(datasets: Any, builder: Any) -> list[str]:
    """Returns the columns of all CSV files. Raises `DataError` where pandas would leave out values, without a word."""
    import pandas

    asked = builder.config.pd_read_csv_kwargs | {"nrows": 1, "chunksize": None}
    first: tuple[str, list[str]] | None = None
    for file in (file for files in _files(datasets, builder).values() for file in files):
        frame = pandas.read_csv(file, **asked)
        if len(frame) and builder.config.index_col is None and not isinstance(frame.index, pandas.RangeIndex):
            raise DataError(f"{file}: its first row has more values than its header has names; expected as many")
        columns = [*map(str, frame.columns)]
        first = first or (file, columns)
        if {*columns} != {*first[1]}:
            raise DataError(
                f"{file} has the columns {columns}, and {first[0]} has {first[1]}; expected the same in each"
            )
    assert first is not None
    return first[1]
