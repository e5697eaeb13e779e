"""Rows of a dataset of the hub or of a directory, by the library `datasets` (extra), which maps its files.

It looks on the hub unless HF_HUB_OFFLINE=1 is set, and never runs a dataset's own code: what is loaded is data files alone.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from counterpoint.environments.data.config import DataConfig
from counterpoint.environments.data.json_columns import decoded, decoders_of
from counterpoint.environments.data.rows import DataError, Row, Rows, digest, lacks
from counterpoint.transport.exact_json import dumps

_HASHED_ROWS = 1000
"""Rows that the fingerprint is of, evenly spaced: a digest of a large dataset would take minutes."""
_EXACT_INTEGERS = 2.0**53
"""Greater ones are not all floats."""
_MARKERS = ("state.json", "dataset_dict.json")
"""Files of a directory that `Dataset.save_to_disk` and `DatasetDict.save_to_disk` wrote."""


class HubRows(Rows):
    """The rows of one split of a dataset."""

    def __init__(self, config: DataConfig) -> None:
        """Loads it, from the network if it is not here. Blocks. Raises `DataError`."""
        self._name = f"dataset {config.dataset}"
        found = _load(config, self._name)
        columns = config.used_columns
        for column in columns:
            if column not in found.column_names:
                raise DataError(f"{self._name}: {lacks(column, found.column_names)}")
        used = found.select_columns(columns) if columns else found
        self._dataset = used.with_format("arrow")  # images stay bytes: nothing is decoded on the event loop
        self._decoders = decoders_of(self._dataset.features.arrow_schema)
        self._is_rounded = _reads_numbers_as_floats(self._dataset)
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
        row: dict[str, Any] = table.to_pylist()[0]
        if self._is_rounded and (number := _rounded(row)) is not None:
            raise DataError(
                f"{self.where(index)}: the library `datasets` has read a number as {number!r}, which may be an integer with all "
                "digits in the file; name the files themselves, as path, by which integers of any size are read"
            )
        return decoded(row, self._decoders, self.where(index))

    def where(self, index: int) -> str:
        """See `Rows`."""
        return f"{self._name}, row {index}"


def _reads_numbers_as_floats(dataset: Any) -> bool:
    """Whether integers of JSON files may be floats here: those of more than 64 bits make a whole column floats."""
    has_floats = "float64" in str(dataset.features)
    return has_floats and getattr(dataset.info, "builder_name", None) in ("json", "csv")


def _rounded(value: Any) -> float | None:
    """Returns a float in a value that may have been an integer that no float holds."""
    if isinstance(value, float):
        return value if _EXACT_INTEGERS <= abs(value) < math.inf else None
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((found for each in parts if (found := _rounded(each)) is not None), None)


def _load(config: DataConfig, name: str) -> Any:
    """Returns the split. Raises `DataError`."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{name} needs the extra `datasets`: pip install 'counterpoint[datasets]' ({error})") from error
    assert config.dataset is not None
    datasets.disable_progress_bars()
    directory = Path(config.dataset)
    split = config.split or "train"
    try:
        if any((directory / marker).is_file() for marker in _MARKERS):
            found = datasets.load_from_disk(str(directory))
        else:
            found = datasets.load_dataset(config.dataset, config.subset, split=split, revision=config.revision)
    except Exception as error:  # the library raises whatever its readers, fsspec and the network do
        offline = " (HF_HUB_OFFLINE is set)" if datasets.config.HF_HUB_OFFLINE else ""
        raise DataError(
            f"{name}, split {split!r}, cannot be loaded{offline}: {type(error).__name__}: {error}"
        ) from error
    if isinstance(found, dict):
        if split not in found:
            raise DataError(f"{name} has no split {split!r}; it has {', '.join(map(repr, found))}")
        return found[split]
    if config.split is not None and any((directory / marker).is_file() for marker in _MARKERS):
        raise DataError(f"{name} was saved as one split; leave out split = {split!r}, or use select")
    return found
