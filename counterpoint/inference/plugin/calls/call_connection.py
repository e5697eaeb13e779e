"""The server's side of a connection that carries many model calls (`call_frames`).

An API server otherwise takes most of a short call's CPU for its head, its route, the tasks that wait for its end and for the
client's, and the answer's head. Here a call is one task. What a client may have of the server is bounded: the calls under way,
the bytes of each, and what it leaves unread. While it does not read, nothing more is read of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import orjson
from fastapi import Request
from fastapi.responses import Response

from counterpoint.inference.call_frames import (
    ABORT,
    ABORTED,
    CALL,
    MOST_ANSWER_BYTES,
    MOST_CALLS,
    UPGRADE,
    FrameSender,
    FrameSplitter,
    MalformedFrames,
    taken,
)
from counterpoint.inference.clients.lost_peers import notice_loss
from counterpoint.inference.plugin.authentication import STILL_ALLOWED
from counterpoint.inference.plugin.socket_body import BODY_SECONDS, connection_of

logger = logging.getLogger(__name__)

MOST_UNSENT_BYTES = 1 << 28
"""The most of answers that a client leaves unread."""

Answer = tuple[int, bytes]
"""The status and the body of an answer."""


def take_calls(raw_request: Request, answer: Callable[[bytes], Awaitable[Answer]], most_bytes: int) -> Response:
    """Makes a request's connection one that carries calls of at most `most_bytes`; returns a response, which is then not sent.

    `answer` is called with the body of each. If it raises, the app's handlers of exceptions answer.
    """
    connection = connection_of(raw_request.scope)
    if raw_request.headers.get("upgrade", "").lower() != UPGRADE:
        return _refusal(HTTPStatus.UPGRADE_REQUIRED, f"this route is for connections with Upgrade: {UPGRADE}")
    if connection is None:
        return _refusal(HTTPStatus.NOT_IMPLEMENTED, "this server was not started by counterpoint inference")
    calls = CallConnection(partial(_answered, raw_request, answer), most_bytes, connection.connections)
    try:
        connection.hand_over(calls, taken(most_bytes))
    except ConnectionAbortedError as error:
        return _refusal(HTTPStatus.BAD_REQUEST, str(error))
    return Response(status_code=HTTPStatus.NO_CONTENT)


async def _answered(raw_request: Request, answer: Callable[[bytes], Awaitable[Answer]], body: bytes) -> Answer:
    """Answers one call as a POST with the same token would be answered."""
    still_allowed = raw_request.scope.get(STILL_ALLOWED)
    if still_allowed is not None and not await still_allowed():
        return HTTPStatus.UNAUTHORIZED, b'{"error":"a valid bearer token is required"}'
    try:
        status, answered = await answer(body)
    except Exception as error:  # noqa: BLE001 - as of every request, whatever it is: its client hears of it
        return await _handled(raw_request, error)
    if len(answered) > MOST_ANSWER_BYTES:
        return HTTPStatus.BAD_REQUEST, b'{"error":"the answer is too long for this connection; ask by a POST"}'
    return status, answered


async def _handled(raw_request: Request, error: Exception) -> Answer:
    handlers = raw_request.app.exception_handlers
    kind = next((kind for kind in type(error).__mro__ if kind in handlers), None)
    if kind in (Exception, None):
        logger.error("A model call failed", exc_info=error)
    if kind is None:
        return HTTPStatus.INTERNAL_SERVER_ERROR, b"Internal Server Error"
    response: Response = await handlers[kind](raw_request, error)
    return response.status_code, bytes(response.body)


def _refusal(status: HTTPStatus, message: str) -> Response:
    return Response(orjson.dumps({"error": message}), status_code=status, media_type="application/json")


class CallConnection(asyncio.Protocol):
    """A client's connection, after the answer 101. `connections` are uvicorn's, which it shuts down and waits for."""

    def __init__(self, answer: Callable[[bytes], Awaitable[Answer]], most_bytes: int, connections: set[Any]) -> None:
        self._answer = answer
        self._connections = connections
        self._splitter = FrameSplitter(most_bytes)
        self._calls: dict[int, asyncio.Task[Answer]] = {}
        self._ends = False
        """Whether the connection is to end with its last answer."""
        self._seen = (0, 0)
        """Bytes that were unread by the client, and of a frame that had not come whole, at the last look."""
        self._stuck = 0
        """Looks at which they have been the same."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins to read calls."""
        self._transport = cast(asyncio.Transport, transport)
        self._sender = FrameSender(self._transport)
        self._connections.add(self)
        self._loop = asyncio.get_running_loop()
        notice_loss(transport.get_extra_info("socket"))
        self._timer = self._loop.call_later(BODY_SECONDS / 2, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the calls, which nobody waits for."""
        self._timer.cancel()
        self._connections.discard(self)
        for call in self._calls.values():
            _cancel(call)

    def data_received(self, data: bytes) -> None:
        """Begins the calls that have come, and ends those that are aborted."""
        try:
            for number, kind, body in self._splitter.split(data):
                self._take(number, kind, body)
        except MalformedFrames as error:
            logger.warning("Cut a connection of model calls: its client %s", error)
            self._transport.abort()

    def _take(self, number: int, kind: int, body: bytes) -> None:
        call = self._calls.get(number)
        if kind == ABORT:
            if call is not None:  # else the two have crossed
                _cancel(call)
            return
        if kind != CALL or call is not None:
            raise MalformedFrames(f"sends a frame of kind {kind} with number {number}, which is none or in use")
        if len(self._calls) >= MOST_CALLS:
            raise MalformedFrames(f"makes more than {MOST_CALLS} calls at once")
        if self._ends:
            self._sender.send(number, HTTPStatus.SERVICE_UNAVAILABLE, b'{"error":"the server shuts down"}')
            return
        self._calls[number] = call = self._loop.create_task(self._answer(body))  # type: ignore[arg-type] # a coroutine
        call.add_done_callback(partial(self._on_answered, number))

    def _on_answered(self, number: int, call: asyncio.Task[Answer]) -> None:
        del self._calls[number]
        if call.cancelled():
            self._sender.send(number, ABORTED)
        elif (error := call.exception()) is not None:
            logger.error("A model call was answered by an error of its own", exc_info=error)
            self._sender.send(number, HTTPStatus.INTERNAL_SERVER_ERROR, b"Internal Server Error")
        else:
            self._sender.send(number, *call.result())
        if self._sender.unsent > MOST_UNSENT_BYTES:
            logger.warning("Cut a connection of model calls: its client leaves %d bytes unread", MOST_UNSENT_BYTES)
            self._transport.abort()
        elif self._ends:
            self.shutdown()

    def shutdown(self) -> None:
        """Takes no further calls, and closes the connection after the last answer. uvicorn calls it when it ends."""
        self._ends = True
        if not self._calls:
            self._sender.flush()
            self._transport.close()

    def pause_writing(self) -> None:
        """Reads nothing more of a client that does not read."""
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Reads on."""
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def _look(self) -> None:
        """Cuts the connection of a client that neither reads what it was sent nor sends the rest of a frame.

        It is looked at twice, since the whole process may have been stopped.
        """
        seen = (self._sender.unsent, self._splitter.held)
        self._stuck = self._stuck + 1 if any(seen) and seen == self._seen else 0
        self._seen = seen
        if self._stuck >= 2:
            logger.warning("Cut a connection of model calls: its client takes or sends nothing for %g s", BODY_SECONDS)
            self._transport.abort()
            return
        self._timer = self._loop.call_later(BODY_SECONDS / 2, self._look)


def _cancel(call: asyncio.Task[Answer]) -> None:
    if not call.cancelling():  # a second time would interrupt the end of the first
        call.cancel()
