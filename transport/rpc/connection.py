"""Asks and answers over one link: numbered, each with a deadline. Who loses the other end learns it at once, by name.

A message is a small header and frames, which travel as they are: large arrays by reference. Both ends may ask. All is for one
event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)

MOST_BYTES = 2**32
"""Largest frame. A peer that claims more is dropped before memory is taken."""

MOST_FRAMES = 2**14 + 4
"""Most frames of a message."""

LONGEST_TEXT, LONGEST_TRACE = 2_000, 16_000
"""Characters of a failure that travel: the beginning of what is said, the end of the traceback."""

_MOST_HEADER_BYTES = 2**17
_LONGEST_SECONDS = 1e6

LOST, LATE = "lost", "late"
"""Kinds of `RpcError` that are made here: the other end is gone, it did not answer in time."""


class RpcError(Exception):
    """An ask that ended without an answer. `kind` is one of the above, or what the other end says; the text is for people."""

    def __init__(self, kind: str, text: str, trace: str = "") -> None:
        super().__init__(text)
        self.kind, self.trace = kind, trace


class _Kind(IntEnum):
    ASK = 0
    ANSWER = 1
    FAILURE = 2
    CANCEL = 3


class _Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    kind: _Kind
    number: Annotated[int, Meta(ge=0)]
    seconds: Annotated[float, Meta(ge=0)] = 0.0
    """How long the asker will wait."""
    failure: Annotated[str, Meta(max_length=256)] = ""
    text: Annotated[str, Meta(max_length=LONGEST_TEXT)] = ""
    trace: Annotated[str, Meta(max_length=LONGEST_TRACE)] = ""


_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(_Header).decode


def ask_frame(number: int, seconds: float) -> bytes:
    """Returns the first frame of an ask."""
    return _pack(_Header(_Kind.ASK, number, max(0.0, seconds)))


def read_answer(frames: Sequence[Buffer]) -> list[Buffer]:
    """Returns the frames of an answer to the one thing that was asked. Raises `RpcError`; `ValueError` for anything else."""
    header = _unpack(as_bytes_view(frames[0]))
    if header.kind == _Kind.FAILURE:
        raise RpcError(header.failure, header.text, header.trace)
    if header.kind != _Kind.ANSWER:
        raise ValueError(f"a message of kind {header.kind} is no answer")
    return [*frames[1:]]


class Link(Protocol):
    """What carries messages to one peer."""

    def send(self, frames: Sequence[Buffer]) -> None:
        """Sends a message by reference; never waits. What is sent to a peer that is gone is dropped."""

    def pause(self, paused: bool) -> None:
        """Stops reading, or reads on."""

    def close(self) -> None:
        """Ends the link; `Connection.lost` is called if it was not."""


class Ask:
    """What the other end asks. Answer it once, on the loop."""

    __slots__ = ("_connection", "_number", "deadline", "frames", "given_up", "on_cancel")

    def __init__(self, connection: Connection, number: int, frames: Sequence[Buffer], deadline: float) -> None:
        self._connection, self._number = connection, number
        self.frames, self.deadline = frames, deadline
        """The deadline is by the loop's clock, which is `time.monotonic`: the asker waits no longer."""
        self.given_up = False
        """Whether the asker waits no more. It counts as open until it is ended here."""
        self.on_cancel: Callable[[], object] | None = None
        """Called when the asker gives up, or is gone."""

    def answer(self, frames: Sequence[Buffer]) -> None:
        """Answers."""
        self._connection.end_ask(self._number, _Header(_Kind.ANSWER, self._number), frames)

    def fail(self, kind: str, text: str, trace: str = "") -> None:
        """Says that it is not done; the asker gets an `RpcError` of this kind."""
        kind, text, trace = (part.encode(errors="backslashreplace").decode() for part in (kind, text, trace))
        header = _Header(_Kind.FAILURE, self._number, 0.0, kind[:256], text[:LONGEST_TEXT], trace[-LONGEST_TRACE:])
        self._connection.end_ask(self._number, header)

    def drop(self) -> None:
        """Leaves it without an answer: the asker waits no more."""
        self._connection.end_ask(self._number)


class Connection:
    """One end of a conversation with `name`, which texts for people use.

    With more than `most_asks` that wait for an answer, the other end is not read, and holds its own back.
    """

    def __init__(self, name: str, on_ask: Callable[[Ask], object] | None = None, most_asks: int = sys.maxsize) -> None:
        self.name, self._on_ask, self._most_asks = name, on_ask, most_asks
        self.link: Link | None = None
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        """Has the reason once the other end is gone."""
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[list[Buffer]]] = {}
        self._open: dict[int, Ask] = {}
        self._log = RateLimitedLog(logger)

    @property
    def is_asked(self) -> bool:
        """Whether an ask of the other end waits for its answer."""
        return bool(self._open)

    def ask(self, frames: Sequence[Buffer], seconds: float) -> asyncio.Future[list[Buffer]]:
        """Asks; the future has the frames of the answer, or an `RpcError`. Cancelling it tells the other end."""
        answer: asyncio.Future[list[Buffer]] = self._loop.create_future()
        if self.link is None or self.ended.done():
            answer.set_exception(RpcError(LOST, f"{self.name} is gone"))
            return answer
        number = next(self._numbers)
        self._asked[number] = answer
        timer = self._loop.call_later(min(seconds, _LONGEST_SECONDS), self._late, number, seconds)

        def settle(_: object) -> None:
            timer.cancel()
            if self._asked.pop(number, None) is not None:  # it was cancelled
                self._send(_Header(_Kind.CANCEL, number))

        answer.add_done_callback(settle)
        self.link.send([ask_frame(number, seconds), *frames])
        return answer

    def close(self, reason: str = "the connection was closed") -> None:
        """Ends the conversation: what is asked fails at once, and what the other end asked is given up."""
        if self.ended.done():
            return
        self.ended.set_result(reason)
        if self.link is not None:
            self.link.close()
        asked, self._asked = self._asked, {}
        for answer in asked.values():
            if not answer.done():
                answer.set_exception(RpcError(LOST, reason))
        for number in [*self._open]:
            self._give_up(number)

    def received(self, frames: Sequence[Buffer]) -> None:
        """Takes a message of the link. One that makes no sense is dropped, and said in the log."""
        try:
            head = as_bytes_view(frames[0])
            if head.nbytes > _MOST_HEADER_BYTES:
                raise ValueError(f"a header of {head.nbytes} bytes; at most {_MOST_HEADER_BYTES} travel")
            self._take(_unpack(head), frames[1:])
        except (ValueError, LookupError) as error:  # msgspec's are ValueErrors
            self._log.note(logging.WARNING, f"dropped a message of {self.name}: {str(error)[:200]}")

    def end_ask(self, number: int, header: _Header | None = None, frames: Sequence[Buffer] = ()) -> None:
        """Sends the answer of an `Ask`."""
        ask = self._open.pop(number, None)
        if header is not None and ask is not None and not ask.given_up:
            self._send(header, frames)
        if len(self._open) == self._most_asks - 1 and self.link is not None:
            self.link.pause(False)

    def _send(self, header: _Header, frames: Sequence[Buffer] = ()) -> None:
        if self.link is not None and not self.ended.done():
            self.link.send([_pack(header), *frames])

    def _take(self, header: _Header, frames: Sequence[Buffer]) -> None:
        number = header.number
        if header.kind == _Kind.ASK:
            if self._on_ask is None or number in self._open:
                raise ValueError(f"ask {number} is open already, or nothing may be asked here")
            deadline = self._loop.time() + min(header.seconds, _LONGEST_SECONDS)
            ask = self._open[number] = Ask(self, number, frames, deadline)
            if len(self._open) >= self._most_asks and self.link is not None:
                self.link.pause(True)
            self._on_ask(ask)
        elif header.kind == _Kind.CANCEL:
            self._give_up(number)
        elif (answer := self._asked.pop(number, None)) is None or answer.done():
            return  # its deadline has passed
        elif header.kind == _Kind.ANSWER:
            answer.set_result([*frames])
        else:
            answer.set_exception(RpcError(header.failure, header.text, header.trace))

    def _give_up(self, number: int) -> None:
        ask = self._open.get(number)
        if ask is not None and not ask.given_up:
            ask.given_up = True
            if ask.on_cancel is not None:
                ask.on_cancel()

    def _late(self, number: int, seconds: float) -> None:
        answer = self._asked.pop(number, None)
        if answer is not None and not answer.done():
            answer.set_exception(RpcError(LATE, f"{self.name} did not answer within {seconds:g} s"))
            self._send(_Header(_Kind.CANCEL, number))
