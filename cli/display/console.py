"""Where `counterpoint run` shows what goes on, and what becomes of the job once nobody can see it any more: nothing.

In `counterpoint run ... | tee log` the Ctrl-C that is to drain the job ends `tee` as well, and a terminal goes with its
connection. What we print afterwards must not end in an error that takes the job down before it has drained.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TextIO, cast


def lasting(file: TextIO) -> TextIO:
    """`file`, whose writes never fail: once one does, it and all later ones go nowhere."""
    return cast(TextIO, _Lasting(file))


class _Lasting:
    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        self._attempt(lambda: self._file.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._file.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError:
            # The descriptor itself leads nowhere from now on, since what is buffered is written again, at the latest at exit.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._file.fileno())
            os.close(null)
