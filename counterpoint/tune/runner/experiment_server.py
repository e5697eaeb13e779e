"""The HTTP API and the page of one experiment, for as long as its runner lives: `counterpoint serve` in a process of its own.

It reads the experiment's files, so it costs the runner nothing. Requests need a token, which is in `serve/` in the experiment's
directory (`docs/serve.md`).
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE

from counterpoint.transport.printable import on_one_line
from counterpoint.transport.process.child import Child, ChildError
from counterpoint.tune.errors import TuneError

logger = logging.getLogger(__name__)

TOKENS = "serve"
"""The folder of the tokens in the experiment's directory."""

START_SECONDS = 120.0

END_SECONDS = 10.0


class ExperimentServer:
    """The process that serves."""

    def __init__(self, directory: Path | None, port: int) -> None:
        """Starts it, and waits until it listens; with port 0, on a free one. Raises `TuneError` if it cannot."""
        if directory is None:
            raise TuneError(f"server_port = {port}, and there is no local_checkpoint_dir whose files could be served")
        if not 0 <= port <= 65535:
            raise TuneError(f"server_port = {port}: expected 0 to 65535")
        command = [sys.executable, "-P", "-m", "counterpoint.cli.main", "serve", str(directory), "--port", str(port)]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - for as long as the process
        self._process = Child("its process", command, stdout=PIPE, stderr=self._errors.fileno())
        try:
            said = self._process.ready(START_SECONDS).decode()
        except ChildError as error:
            self._errors.seek(0)
            problem = on_one_line(self._errors.read().decode(errors="replace")) or str(error)
            self.end()
            raise TuneError(f"server_port = {port}: nothing can be served: {problem}") from None
        self.url = said.partition("\n")[0].rpartition(" ")[2]
        """The URL at which the server listens."""
        logger.info("%s is served at %s; the tokens are in %s", directory, self.url, directory / TOKENS)

    def end(self) -> None:
        """Ends the server."""
        self._process.stop(END_SECONDS)
        self._process.close()
        self._errors.close()
