"""Rows of a Parquet file (extra `datasets`). Its row groups are decoded one after the other into a file that is mapped.

Parquet has no access to one row: a row group of a hundred thousand must be decoded for it, which would block an event loop.
Arrow's own format has it. The file with it is temporary, has no name, and takes the size of the columns that are used; a small
one is in memory. So opening costs one pass over these columns, and memory for one row group.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from counterpoint.environments.data.arrow_values import ArrowValues
from counterpoint.environments.data.files import file_digest
from counterpoint.environments.data.rows import DataError, Row, Rows, lacks

_ROWS_A_BATCH = 1024


class Parquet(Rows):
    """The rows of one file."""

    def __init__(self, path: Path, columns: Sequence[str], max_row_bytes: int) -> None:
        """Decodes `columns`; all, if empty. Raises `DataError`, `OSError`."""
        pyarrow, parquet = import_arrow(f"{path}")
        self._path = path
        self._fingerprint = file_digest(path)
        try:
            # Without `pre_buffer`, by which it would hold the bytes of all row groups.
            with parquet.ParquetFile(path, pre_buffer=False) as file:
                present = file.schema_arrow.names
                for column in columns:
                    if column not in present:
                        raise DataError(f"{path}: {lacks(column, present)}")
                schema = file.schema_arrow
                used = [schema.field(name) for name in (columns or present)]
                self._values = ArrowValues(pyarrow.schema(used, schema.metadata), f"{path}")
                batches = file.iter_batches(_ROWS_A_BATCH, columns=list(columns) or None)
                self._reader, self._ends = _mapped(pyarrow, batches, self._size_checked(max_row_bytes))
        except pyarrow.ArrowException as error:
            raise DataError(f"{path} cannot be read as Parquet: {error}") from error

    def _size_checked(self, max_row_bytes: int) -> Any:
        def check(batch: Any, first: int) -> None:
            if batch.nbytes <= max_row_bytes:
                return
            for index in range(len(batch)):
                if (size := batch.slice(index, 1).nbytes) > max_row_bytes:
                    raise DataError(
                        f"{self._path}, row {first + index}: it has {size} bytes; expected at most max_row_bytes = "
                        f"{max_row_bytes}"
                    )

        return check

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def fingerprint(self) -> str:
        """See `Rows`: of the file's bytes."""
        return self._fingerprint

    def row(self, index: int) -> Row:
        """See `Rows`."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[number - 1]) if number else 0
        return self._values.row(self._reader.get_batch(number).slice(index - first, 1), self.where(index))

    def where(self, index: int) -> str:
        """See `Rows`."""
        return f"{self._path}, row {index}"


def import_arrow(wanted_by: str) -> tuple[Any, Any]:
    """Imports pyarrow and its Parquet reader. Raises `DataError` that names the extra where they are missing."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"{wanted_by} needs the extra `datasets`: pip install 'counterpoint[datasets]' ({error})"
        ) from error
    return pyarrow, pyarrow.parquet


def _mapped(pyarrow: Any, batches: Any, check: Any) -> tuple[Any, Any]:
    """Writes the batches to a temporary file; returns its reader, and after how many rows each batch ends."""
    ends: list[int] = []
    with tempfile.TemporaryFile(prefix="counterpoint-data-") as file:
        writer = None
        for batch in batches:
            check(batch, ends[-1] if ends else 0)
            if not len(batch):
                continue
            writer = writer or pyarrow.ipc.new_file(file, batch.schema)
            writer.write_batch(batch)
            ends.append((ends[-1] if ends else 0) + len(batch))
        if writer is None:
            return None, np.zeros(0, np.int64)
        writer.close()
        file.flush()
        # By the descriptor, since the file has no name; the map outlives it.
        source = pyarrow.memory_map(f"/proc/self/fd/{file.fileno()}")
        return pyarrow.ipc.open_file(source), np.asarray(ends)
