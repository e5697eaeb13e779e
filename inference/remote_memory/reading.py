"""Reads files that a client lends (`inference/sent_weights.py`) into a directory: starts the reader, and watches what comes."""

from __future__ import annotations

import asyncio
import base64
import os
from asyncio.subprocess import PIPE
from contextlib import suppress
from pathlib import Path

import orjson

from inference.remote_memory.agent import environment_of, program
from inference.sent_weights import Readable


async def read_files(lent: Readable, directory: Path, silent_seconds: float) -> None:
    """Reads all files that come into `directory`.

    Raises `TimeoutError` once no more of their bytes come for `silent_seconds`, `ConnectionAbortedError` if they cannot be read.
    """
    files = [(str(directory / name), lent.addresses[name], nbytes) for name, nbytes in lent.offer.coming.items()]
    environment = environment_of(os.environ)
    process = await asyncio.create_subprocess_exec(*program("reader"), stdin=PIPE, stdout=PIPE, env=environment)
    assert process.stdin is not None
    assert process.stdout is not None
    come = "0"
    try:
        with suppress(RuntimeError, OSError):  # it has ended already, which is found below
            process.stdin.write(orjson.dumps({"agent": base64.b64encode(lent.agent).decode(), "files": files}) + b"\n")
        while True:
            try:
                async with asyncio.timeout(silent_seconds):
                    said = (await process.stdout.readline()).decode().rstrip("\n")
            except TimeoutError:
                raise TimeoutError(
                    f"no more of the weights could be read for {silent_seconds:g} s, after {come} bytes"
                ) from None
            if said == "done":
                return
            if not said.isdecimal():
                reason = said.removeprefix("failed ") or f"the reader ended with exit code {await process.wait()}"
                raise ConnectionAbortedError(f"the weights could not be read after {come} bytes: {reason}")
            come = said
    finally:
        with suppress(ProcessLookupError):  # it has ended
            process.kill()
        await asyncio.shield(process.wait())
