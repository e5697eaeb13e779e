"""Lets a server read files of this machine that are in memory (`inference/sent_weights.py`): starts their source, and ends it."""

from __future__ import annotations

import base64
import os
import subprocess
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType

import orjson

from inference.remote_memory.agent import environment_of, program
from inference.sent_weights import Offer, Readable
from transport.files.shared_memory import is_memory
from transport.process.child import NoLineError, line_of

START_SECONDS = 60.0
"""How long a source may take to start: a second, but longer on a busy machine, or where it registers hundreds of gigabytes."""


def are_in_memory(files: Mapping[str, FileIO]) -> bool:
    """Returns whether all of these open files are in memory, also those that were removed."""
    try:
        return all(is_memory(Path(f"/proc/self/fd/{file.fileno()}")) for file in files.values())
    except OSError:  # of a disk
        return False


class Lending:
    """The source of one transfer, as a context: its process has ended when the context is left."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._aborted = False

    def start(self, offer: Offer, files: Mapping[str, FileIO]) -> Readable:
        """Returns the files of an offer that come, as they can be read until the context is left.

        Raises `OSError` if they cannot be, also after `START_SECONDS`.
        """
        names = list(offer.coming)
        descriptors = [files[name].fileno() for name in names]
        self._process = subprocess.Popen(
            program("source", *map(str, descriptors)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=descriptors,
            env=environment_of(os.environ),
        )
        if self._aborted:
            self.abort()
        try:
            said = line_of(self._process, START_SECONDS)
        except NoLineError as error:
            raise ConnectionAbortedError(f"the source of files in memory {error}") from error
        try:
            about = orjson.loads(said)
            addresses = dict(zip(names, about["addresses"], strict=True))
            return Readable(offer, base64.b64decode(about["agent"]), addresses)
        except (ValueError, KeyError, TypeError) as error:
            raise ConnectionAbortedError(f"the source of files in memory said {said[:100]!r}: {error!r}") from error

    @property
    def fault(self) -> str:
        """What happened to the source, if it has ended by itself; else empty."""
        code = None if self._process is None else self._process.poll()
        return "" if code is None else f"the source of files in memory ended with exit code {code}"

    def abort(self) -> None:
        """Ends it at once, from another thread."""
        self._aborted = True
        if self._process is not None:
            self._process.kill()

    def __enter__(self) -> Lending:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            with self._process:  # closes the pipes, and waits
                pass
