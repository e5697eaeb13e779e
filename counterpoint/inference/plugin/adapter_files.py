"""Private copies of adapters' files, from which the engine may read an adapter at any time, even after the trainer removed it.

`adapters` gives the reason.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from counterpoint.inference.checkpoint import ADAPTER_FILES
from counterpoint.transport.files.atomic import remove_directory
from counterpoint.transport.files.own_directory import OwnDirectory

PREFIX = "counterpoint-adapters-"


class AdapterFiles:
    """A directory of this process's own, removed when it ends; after a kill, when the next server starts.

    `<number>.<load>/` are copies, and `<number>` links to the newest of an adapter.
    """

    def __init__(self) -> None:
        self._own = OwnDirectory(Path(tempfile.gettempdir()), PREFIX)
        self._root = self._own.path

    def copy(self, directory: Path, number: int, load: int) -> Path:
        """Copies the adapter in `directory`. Raises `OSError`, and then leaves no copy."""
        copy = self._root / f"{number}.{load}"
        copy.mkdir()
        try:
            for name in ADAPTER_FILES:
                shutil.copyfile(directory / name, copy / name)
        except OSError:
            remove_directory(copy)
            raise
        return copy

    def adopt(self, copy: Path, number: int) -> Path:
        """Makes `copy` the newest of adapter `number`, removes the older ones, and returns the path of its link."""
        path, link = self._root / str(number), self._root / f"{number}.link"
        link.symlink_to(copy.name)
        link.replace(path)
        for old in self._root.glob(f"{number}.*"):
            if old != copy:
                remove_directory(old)
        return path

    def discard(self, copy: Path) -> None:
        """Removes a copy that was not adopted."""
        remove_directory(copy)

    def remove(self, number: int) -> None:
        """Removes all copies of adapter `number`."""
        (self._root / str(number)).unlink(missing_ok=True)
        for copy in self._root.glob(f"{number}.*"):
            remove_directory(copy)
