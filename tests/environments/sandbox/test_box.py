"""A box ends with its caller: no command of it goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from counterpoint.environments.sandbox.box import Box
from counterpoint.environments.sandbox.python_sandbox import SandboxUnavailable
from tests.support.polling import wait_until

CALLER = """
import asyncio, sys
from counterpoint.environments.sandbox.box import Box, box_variables

async def main():
    async with Box(8, 256) as box:
        await box.begin()
        command = sys.argv[1] + "; exec -a " + sys.argv[2] + " sleep 1000"
        await box.run(["/bin/bash", "-c", command], box_variables(), "/", seconds=900.0)

asyncio.run(main())
"""


@pytest.fixture
async def _boxes() -> None:
    """Skips where the machine confines no box."""
    try:
        async with Box(1, 256) as box:
            await box.begin()
    except SandboxUnavailable as error:
        pytest.skip(str(error))


def commands() -> set[bytes]:
    found = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.add(file.read_bytes().split(b"\0")[0])
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("_boxes")
@pytest.mark.parametrize("first", ["true", "exec >&- 2>&-"], ids=["open output", "closed output"])
def test_a_command_ends_with_a_caller_that_is_killed(tmp_path: Path, first: str) -> None:
    name = f"sleeper-{os.getpid()}-{len(first)}"
    caller = subprocess.Popen([sys.executable, "-c", CALLER, first, name], env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        wait_until(lambda: name.encode() in commands(), "the command to run")
    finally:
        caller.send_signal(signal.SIGKILL)
        caller.wait()
    wait_until(lambda: name.encode() not in commands(), "the command to end", 60.0)
