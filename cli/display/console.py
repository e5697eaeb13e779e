"""The consoles that commands print to, and output that goes on after its reader has gone.

In `counterpoint run ... | tee log`, Ctrl-C ends `tee` as well as it drains the job, and a closed connection takes its terminal
away. Output after that must not raise an error that ends the job before it has drained.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TextIO, cast

from rich.console import Console


def console_for(
    file: TextIO | None = None, *, pipe_width: int, markup: bool = True, soft_wrap: bool = False
) -> Console:
    """Creates a console on `file`, or on standard output.

    A file that is not a terminal gets `pipe_width` columns. With its default of 80, rich would cut most tables.
    """
    stream = sys.stdout if file is None else file
    width = None if stream.isatty() else pipe_width
    return Console(file=file, width=width, markup=markup, soft_wrap=soft_wrap)


def lasting(file: TextIO) -> TextIO:
    """Wraps `file` so that its writes never fail: after the first failure, it and all later ones write nothing."""
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
            # Redirects the descriptor itself, since Python writes buffered text again, at the latest at exit.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._file.fileno())
            os.close(null)
