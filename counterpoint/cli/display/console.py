"""The consoles that commands print to, and output that goes on after its reader has gone.

In `counterpoint run ... | tee log`, Ctrl-C ends `tee` as well as it drains the job, and a closed connection takes its terminal
away. Output after that must not raise an error that ends the job before it has drained. Nor may a reader that pauses, as after
Ctrl-S, hold up the event loop of a job: its keepers would take the command for dead.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, TextIO, cast

from rich.console import Console

MOST_WAITING = 2**20
"""Characters that wait for a reader that pauses. What comes then is left out."""


def console_for(
    file: TextIO | None = None, *, pipe_width: int, markup: bool = True, soft_wrap: bool = False
) -> Console:
    """Creates a console on `file`, or on standard output.

    A file that is not a terminal gets `pipe_width` columns. With its default of 80, rich would cut most tables. Names such as
    `s0:train:0` are printed as they are, not with a picture.
    """
    stream = sys.stdout if file is None else file
    width = None if stream.isatty() else pipe_width
    return Console(file=file, width=width, markup=markup, emoji=False, soft_wrap=soft_wrap)


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


@contextmanager
def printed_beside(console: Console) -> Iterator[None]:
    """Prints from a thread during the block, so that a reader that pauses holds up nobody else.

    The block ends once everything is printed.
    """
    file = console.file
    beside = _Beside(file)
    console.file = cast(IO[str], beside)
    try:
        yield
    finally:
        console.file = file
        beside.close()


class _Beside:
    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._texts: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._waiting = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._print, name="output", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        with self._lock:
            if self._waiting + len(text) <= MOST_WAITING:
                self._waiting += len(text)
                self._texts.put(text)
        return len(text)

    def flush(self) -> None:
        """Done after each text by the thread."""

    def close(self) -> None:
        self._texts.put(None)
        self._thread.join()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _print(self) -> None:
        while (text := self._texts.get()) is not None:
            self._file.write(text)
            self._file.flush()
            with self._lock:
                self._waiting -= len(text)
