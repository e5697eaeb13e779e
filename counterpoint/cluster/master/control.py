"""The master's control socket: a UNIX socket of this user, over which clients ask and are answered in lines of JSON.

Everything is bounded: the length of a line, the number of clients, how long one may be silent, and how long an answer takes.
`counterpoint/cluster/master/queries.py` has the answers; `ask` is the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from counterpoint.cluster.errors import ClusterError
from counterpoint.transport.files.untrusted import UntrustedFileError, parse_json

logger = logging.getLogger(__name__)

MAX_REQUEST = 64 * 2**10
MAX_ANSWER = 64 * 2**20
MOST_CLIENTS = 64
IDLE_SECONDS = 10.0
ANSWER_SECONDS = 10.0

_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: pid, uid, gid."""

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class ControlError(ClusterError):
    """The master answered that it could not do what it was asked; the message says why."""


class NoMaster(ClusterError):
    """No master answers in a job's directory; the message says what to do."""


class NotStarted(NoMaster):
    """The job was made and no master has begun it; the message says how to start it."""


def unknown_role(role: str, names: Sequence[str]) -> ControlError:
    """The error for a role that a job does not have; `names` are those that it has."""
    return ControlError(f"the job has no role {role!r}; its roles are {', '.join(names)}")


class ControlServer:
    """Listens for clients."""

    def __init__(self, path: Path, answer: Answer) -> None:
        self._path = path
        self._answer = answer
        self._clients: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Begins to listen; a socket that an earlier master left is replaced. Raises `OSError`."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self._path, limit=MAX_REQUEST)
        self._path.chmod(0o600)

    async def close(self) -> None:
        """Ends every connection. The path stays: it may be a later master's by now."""
        if self._server is not None:
            self._server.close()
        for client in list(self._clients):
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._clients) < MOST_CLIENTS and _is_ours(writer):
                self._clients.add(task)
                await self._answer_each(reader, writer)
        except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
            logger.debug("a client of the control socket left: %r", error)
        except asyncio.CancelledError:
            pass  # by `close`
        finally:
            self._clients.discard(task)
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _answer_each(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            async with asyncio.timeout(IDLE_SECONDS):
                line = await reader.readline()
            if not line:
                return
            writer.write(orjson.dumps(await self._answer_one(line)) + b"\n")
            async with asyncio.timeout(IDLE_SECONDS):
                await writer.drain()

    async def _answer_one(self, line: bytes) -> dict[str, Any]:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return {"answer": await self._answer(parse_json(line))}
        except TimeoutError:
            return {"error": f"the master did not answer within {ANSWER_SECONDS:g} s; `status` says what it waits for"}
        except (ControlError, UntrustedFileError) as error:
            return {"error": str(error)}
        except Exception as error:
            logger.exception("a request at the control socket failed")
            return {"error": f"the master failed to answer: {error!r}"}


def _is_ours(writer: asyncio.StreamWriter) -> bool:
    """Whether the client is of this user, or root."""
    connection = writer.get_extra_info("socket")
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return user in (0, os.getuid())


def ask(path: Path, request: dict[str, Any], seconds: float = ANSWER_SECONDS + 5.0) -> dict[str, Any]:
    """Sends one request to the master and returns its answer. Blocks.

    Raises `NoMaster` if none answers, `ControlError` with its reason if it refuses.
    """
    received = bytearray()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(seconds)
            connection.connect(str(path))
            connection.sendall(orjson.dumps(request) + b"\n")
            while not received.endswith(b"\n") and len(received) <= MAX_ANSWER:
                chunk = connection.recv(2**20)
                if not chunk:
                    raise ConnectionResetError("the connection ended before the answer")
                received += chunk
    except OSError as error:
        raise NoMaster(f"no master answers at {path}: {error}") from error
    answer = parse_json(bytes(received))
    if "error" in answer:
        raise ControlError(str(answer["error"]))
    result: dict[str, Any] = answer["answer"]
    return result
