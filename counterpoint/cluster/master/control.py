"""The master's control socket: a UNIX socket of this user, over which clients ask and are answered in JSON (`transport/rpc`).

Everything is bounded: what is asked, the number of clients, how much one asks at once, and how long an answer takes.
`counterpoint/cluster/master/queries.py` has the answers; `ask` is the other end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

from counterpoint.cluster.errors import ClusterError
from counterpoint.transport.files.untrusted import UntrustedFileError, parse_json
from counterpoint.transport.rpc.connection import PeerAsk, RpcError
from counterpoint.transport.rpc.stream import UnixListener, ask_once

logger = logging.getLogger(__name__)

MAX_REQUEST = 64 * 2**10
MAX_ANSWER = 64 * 2**20
MOST_CLIENTS = 64
MOST_ASKS = 4
ANSWER_SECONDS = 10.0

REFUSED = "refused"
"""How the master fails an ask; the text says why."""

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
        self._listener = UnixListener(self._take, MOST_ASKS, MAX_REQUEST, MOST_CLIENTS)
        self._answering: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begins to listen; a socket that an earlier master left is replaced. Raises `OSError`."""
        await self._listener.start(str(self._path))

    async def close(self) -> None:
        """Ends every connection. The path stays: it may be a later master's by now."""
        self._listener.close()
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)

    def _take(self, ask: PeerAsk) -> None:
        task = asyncio.create_task(self._answer_one(ask))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer_one(self, ask: PeerAsk) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await self._answer(parse_json(b"".join(map(bytes, ask.frames))))
            ask.answer([orjson.dumps(answer)])
        except TimeoutError:
            said = f"the master did not answer within {ANSWER_SECONDS:g} s; `status` says what it waits for"
            ask.fail(REFUSED, said)
        except (ControlError, UntrustedFileError) as error:
            ask.fail(REFUSED, str(error))
        except Exception as error:
            logger.exception("a request at the control socket failed")
            ask.fail(REFUSED, f"the master failed to answer: {error!r}")


def ask(path: Path, request: dict[str, Any], seconds: float = ANSWER_SECONDS + 5.0) -> dict[str, Any]:
    """Sends one request to the master and returns its answer. Blocks.

    Raises `NoMaster` if none of this version answers, `ControlError` with its reason if it refuses.
    """
    try:
        answer = ask_once(str(path), [orjson.dumps(request)], seconds, MAX_ANSWER)
        return parse_json(b"".join(map(bytes, answer)))
    except RpcError as error:
        raise ControlError(str(error)) from None
    except (OSError, ValueError) as error:
        raise NoMaster(f"no master answers at {path}: {error}") from error
