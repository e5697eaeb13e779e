"""A vLLM server for one check: started as `counterpoint inference`, on a free port, and ended with the check."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w

from cluster.process import SYSTEMD_VARIABLES
from transport.errors import UserError
from transport.process.launch import guarded

STOP_SECONDS = 30.0
LINES_SHOWN = 15


@contextmanager
def own_server(settings: dict[str, Any]) -> Iterator[tuple[str, subprocess.Popen[bytes], Path]]:
    """Starts a server by the settings of `[inference]`. Yields its URL, its process and the file of its output.

    It may not be ready yet; `explain_end` says why one has ended.
    """
    with tempfile.TemporaryDirectory(prefix="counterpoint-") as folder:
        log, file = Path(folder) / "inference.log", Path(folder) / "inference.toml"
        port = _free_port()
        file.write_text(tomli_w.dumps({**settings, "host": "127.0.0.1", "port": port}), encoding="utf-8")
        environment = {key: value for key, value in os.environ.items() if key not in SYSTEMD_VARIABLES}
        with log.open("wb") as output:
            process = subprocess.Popen(
                guarded([sys.executable, "-P", "-m", "cli.main", "inference", str(file)]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        try:
            yield f"http://127.0.0.1:{port}", process, log
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def explain_end(process: subprocess.Popen[bytes], log: Path) -> UserError:
    """Returns the error that says how the server ended, with the last lines of its output."""
    lines = log.read_text(errors="replace").splitlines()[-LINES_SHOWN:]
    return UserError(
        f"the inference server ended with exit code {process.returncode} before it was ready:\n" + "\n".join(lines)
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
