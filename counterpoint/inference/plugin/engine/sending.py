"""What an API server sends its engine in one turn of the loop goes to the socket's thread at once.

A group of rollouts asks for all its completions together. vLLM sends each as soon as it has been checked, which wakes the thread
that writes to the engine, and a thread of the engine, for each: 64 times for the requests of a small step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from functools import partial
from typing import Any


class SendsTogether:
    """Takes the place of the method by which vLLM's client of an engine sends a message. The order stays."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._send = client._send_input_message
        self._waiting: deque[tuple[Any, Any, asyncio.Future[None]]] = deque()

    def __call__(self, message: Any, engine: Any) -> Awaitable[None]:
        """Sends a message at the end of the loop's turn, even if the caller is cancelled. Raises if the engine is dead."""
        self._client.ensure_alive()
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send_all)
        sent: asyncio.Future[None] = loop.create_future()
        self._waiting.append((message, engine, sent))
        return sent

    def _send_all(self) -> None:
        while self._waiting:
            message, engine, sent = self._waiting.popleft()
            try:
                sending = self._send(message, engine)
            except Exception as error:  # noqa: BLE001 - whatever it is, its caller hears of it: the engine may have died
                if not sent.done():
                    sent.set_exception(error)
                continue
            if sending.done():
                _pass_on(sent, sending)
            else:
                sending.add_done_callback(partial(_pass_on, sent))


def _pass_on(sent: asyncio.Future[None], sending: asyncio.Future[Any]) -> None:
    if sending.cancelled():
        sent.cancel()
        return
    error = sending.exception()
    if sent.done():  # its caller was cancelled
        return
    if error is not None:
        sent.set_exception(error)
    else:
        sent.set_result(None)
