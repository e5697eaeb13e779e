"""Asks and answers over one link: numbered, each with a deadline. Who loses the other end learns it at once, by name.

A message is a small header and frames, which travel as they are: large arrays by reference. Both ends may ask. What waits for its
answer is bounded: an end holds back what it asks beyond, and refuses what it is asked beyond. All is for one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.rate_limited_log import RateLimitedLog
from counterpoint.transport.typed import met

logger = logging.getLogger(__name__)

MOST_BYTES = 2**32
"""Largest frame. A peer that claims more is dropped before memory is taken."""

MOST_FRAMES = 2**14 + 4
"""Most frames of a message."""

MOST_CLIENTS = 1024
"""Most callers of a listener at a time."""

LONGEST_TEXT, LONGEST_TRACE = 2_000, 16_000
"""Characters of a failure that travel: the beginning of what is said, the end of the traceback."""

_MOST_HEADER_BYTES = 2**17
_LONGEST_SECONDS = 1e6

LOST, LATE, BUSY = "lost", "late", "busy"
"""Kinds of `RpcError` that are made here: the other end is gone; it did not answer in time; it takes no more for now."""


class RpcError(Exception):
    """An ask that ended without an answer. `kind` is one of the above, or what the other end says; the text is for people."""

    def __init__(self, kind: str, text: str, trace: str = "") -> None:
        super().__init__(text)
        self.kind, self.trace = kind, trace


def most_together(most_bytes: int) -> int:
    """Returns how many bytes a message of frames of at most `most_bytes` may have, and all that one peer asks at a time."""
    return 4 * most_bytes + 2**26


def size_of(frames: Sequence[Buffer]) -> int:
    """Returns the bytes of frames."""
    size = 0
    for frame in frames:
        size += len(frame) if type(frame) is bytes else as_bytes_view(frame).nbytes
    return size


@dataclass(slots=True)
class OpenAsks:
    """Asks that wait for their answers, and the bytes of their frames."""

    most_asks: int
    most_bytes: int
    asks: int = 0
    nbytes: int = 0

    def __str__(self) -> str:
        return f"{self.asks} asks of {self.nbytes} bytes wait; at most {self.most_asks} of {self.most_bytes} bytes may"

    def has_room(self, nbytes: int) -> bool:
        """Whether one more ask of so many bytes may wait, too."""
        return self.asks < self.most_asks and self.nbytes + nbytes <= self.most_bytes

    def add(self, nbytes: int, asks: int = 1) -> None:
        """Counts an ask, or one less with the negative of both."""
        self.asks += asks
        self.nbytes += nbytes


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
_unpack = msgspec.msgpack.Decoder(met(_Header)).decode


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


class PeerLink(Protocol):
    """What carries messages to one peer."""

    def send(self, frames: Sequence[Buffer]) -> None:
        """Sends a message by reference; never waits. What is sent to a peer that is gone is dropped."""

    def close(self) -> None:
        """Ends the link; `Connection.lost` is called if it was not."""


class PeerAsk:
    """What the other end asks. Answer it once, on the loop."""

    __slots__ = ("_number", "connection", "deadline", "frames", "given_up", "on_cancel", "size")

    def __init__(
        self, connection: Connection, number: int, frames: Sequence[Buffer], size: int, deadline: float
    ) -> None:
        self.connection, self._number, self.size = connection, number, size
        self.frames, self.deadline = frames, deadline
        """The deadline is by the loop's clock, which is `time.monotonic`: the asker waits no longer."""
        self.given_up = False
        """Whether the asker waits no more. It counts as open until it is ended here."""
        self.on_cancel: Callable[[], object] | None = None
        """Called when the asker gives up, or is gone."""

    def answer(self, frames: Sequence[Buffer]) -> None:
        """Answers."""
        self.connection.end_ask(self, _Header(_Kind.ANSWER, self._number), frames)

    def fail(self, kind: str, text: str, trace: str = "") -> None:
        """Says that it is not done; the asker gets an `RpcError` of this kind."""
        kind, text, trace = (part.encode(errors="backslashreplace").decode() for part in (kind, text, trace))
        header = _Header(_Kind.FAILURE, self._number, 0.0, kind[:256], text[:LONGEST_TEXT], trace[-LONGEST_TRACE:])
        self.connection.end_ask(self, header)


class Connection:
    """One end of a conversation with `name`, which texts for people use.

    In each direction `most_asks` of at most `most_together(most_bytes)` bytes wait for their answers. An ask is counted until it
    is answered, also when its asker has given it up. `shared` counts the asks of all callers of a listener.
    """

    def __init__(
        self,
        name: str,
        on_ask: Callable[[PeerAsk], object] | None = None,
        most_asks: int = sys.maxsize,
        most_bytes: int = MOST_BYTES,
        shared: OpenAsks | None = None,
    ) -> None:
        self.name, self._on_ask = name, on_ask
        self.link: PeerLink | None = None
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        """Has the reason once the other end is gone."""
        self._numbers = itertools.count(1)
        self._unsent: dict[int, tuple[asyncio.Future[list[Buffer]], Sequence[Buffer], float]] = {}
        """What is held back, with its deadline."""
        self._asked: dict[int, tuple[asyncio.Future[list[Buffer]], int]] = {}
        """What is asked, with its bytes."""
        self._asking = OpenAsks(most_asks, most_together(most_bytes))
        self._open: dict[int, PeerAsk] = {}
        self._loads = [OpenAsks(most_asks, most_together(most_bytes)), *([] if shared is None else [shared])]
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
        number, seconds = next(self._numbers), min(seconds, _LONGEST_SECONDS)
        timer = self._loop.call_later(seconds, self._late, answer, seconds)
        answer.add_done_callback(partial(self._settle, number, timer))
        size = size_of(frames)
        if not self._unsent and (not self._asked or self._asking.has_room(size)):
            self._send_ask(number, answer, frames, size, seconds)
        else:
            self._unsent[number] = answer, frames, self._loop.time() + seconds
        return answer

    def close(self, reason: str = "the connection was closed") -> None:
        """Ends the conversation: what is asked fails at once, and what the other end asked is given up."""
        if self.ended.done():
            return
        self.ended.set_result(reason)
        if self.link is not None:
            self.link.close()
        asked = [answer for answer, _ in self._asked.values()] + [answer for answer, *_ in self._unsent.values()]
        self._asked, self._unsent = {}, {}
        for answer in asked:
            if not answer.done():
                answer.set_exception(RpcError(LOST, reason))
        for number in [*self._open]:
            self._give_up(number)

    def received(self, frames: Sequence[Buffer]) -> None:
        """Takes a message of the link. One that makes no sense is dropped, and said in the log."""
        try:
            head = as_bytes_view(frames[0])
            if head.nbytes > _MOST_HEADER_BYTES or len(frames) > MOST_FRAMES:
                said = f"a header of {head.nbytes} bytes and {len(frames) - 1} frames"
                raise ValueError(f"{said}; at most {_MOST_HEADER_BYTES} bytes and {MOST_FRAMES - 1} frames travel")
            self._take(_unpack(head), frames[1:])
        except (ValueError, LookupError) as error:  # msgspec's are ValueErrors
            self._log.note(logging.WARNING, f"dropped a message of {self.name}: {str(error)[:200]}")

    def end_ask(self, ask: PeerAsk, header: _Header, frames: Sequence[Buffer] = ()) -> None:
        """Sends the answer of a `PeerAsk`; only that it has ended if its asker has given it up."""
        if self._open.get(header.number) is ask:
            del self._open[header.number]
            for load in self._loads:
                load.add(-ask.size, -1)
            self._send(header, () if ask.given_up else frames)

    def _send(self, header: _Header, frames: Sequence[Buffer] = ()) -> None:
        if self.link is not None and not self.ended.done():
            self.link.send([_pack(header), *frames])

    def _send_ask(
        self, number: int, answer: asyncio.Future[list[Buffer]], frames: Sequence[Buffer], size: int, seconds: float
    ) -> None:
        self._asked[number] = answer, size
        self._asking.add(size)
        if self.link is not None:
            self.link.send([ask_frame(number, seconds), *frames])

    def _send_held_back(self) -> None:
        """Sends what was held back, as far as there is room, in order."""
        while self._unsent:
            number = next(iter(self._unsent))
            answer, frames, deadline = self._unsent[number]
            size = size_of(frames)
            if not answer.done() and self._asked and not self._asking.has_room(size):
                return
            del self._unsent[number]
            if not answer.done():  # else it was given up a moment ago, and `_settle` is on its way
                self._send_ask(number, answer, frames, size, deadline - self._loop.time())

    def _settle(self, number: int, timer: asyncio.TimerHandle, _: object) -> None:
        timer.cancel()
        if self._unsent.pop(number, None) is not None:
            self._send_held_back()  # it may have been too large, and what is behind it small
        elif number in self._asked:  # nobody waits for the answer any more
            self._send(_Header(_Kind.CANCEL, number))

    def _take(self, header: _Header, frames: Sequence[Buffer]) -> None:
        number = header.number
        if header.kind == _Kind.ASK:
            self._take_ask(header, frames)
        elif header.kind == _Kind.CANCEL:
            self._give_up(number)
        elif (asked := self._asked.pop(number, None)) is not None:
            answer, size = asked
            self._asking.add(-size, -1)
            if answer.done():
                pass  # nobody waits for it
            elif header.kind == _Kind.ANSWER:
                answer.set_result([*frames])
            else:
                answer.set_exception(RpcError(header.failure, header.text, header.trace))
            if self._unsent:
                self._send_held_back()

    def _take_ask(self, header: _Header, frames: Sequence[Buffer]) -> None:
        number, size = header.number, size_of(frames)
        if self._on_ask is None or number in self._open:
            raise ValueError(f"ask {number} is open already, or nothing may be asked here")
        for load in self._loads:
            if not load.has_room(size):
                said = f"{self.name} asks {size} bytes more while {load}"
                self._log.note(logging.WARNING, f"refused an ask: {said}")
                self._send(_Header(_Kind.FAILURE, number, 0.0, BUSY, said))
                return
        for load in self._loads:
            load.add(size)
        deadline = self._loop.time() + min(header.seconds, _LONGEST_SECONDS)
        ask = self._open[number] = PeerAsk(self, number, frames, size, deadline)
        self._on_ask(ask)

    def _give_up(self, number: int) -> None:
        ask = self._open.get(number)
        if ask is not None and not ask.given_up:
            ask.given_up = True
            if ask.on_cancel is not None:
                ask.on_cancel()

    def _late(self, answer: asyncio.Future[list[Buffer]], seconds: float) -> None:
        if not answer.done():
            answer.set_exception(RpcError(LATE, f"{self.name} did not answer within {seconds:g} s"))
