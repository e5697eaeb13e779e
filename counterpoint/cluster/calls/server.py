"""The callee's end: what calls say, and the threads in which the methods of a worker run.

Calls arrive on a loop in one thread. Plain methods run in another one, one at a time and in order; `async def` methods on a loop
in a third, which starts with the first such call. `caller.py` is the other end, `remote.py` says what may be called.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from counterpoint.cluster.calls import codec
from counterpoint.cluster.calls.codec import CodecError
from counterpoint.cluster.calls.remote import Method, methods_of
from counterpoint.transport.files.atomic import as_bytes_view
from counterpoint.transport.rate_limited_log import RateLimitedLog
from counterpoint.transport.rpc.connection import BUSY, LATE, LOST, MOST_BYTES, PeerAsk
from counterpoint.transport.rpc.curve import CurveListener
from counterpoint.transport.rpc.loop_thread import LoopThread
from counterpoint.transport.rpc.stream import UnixListener
from counterpoint.transport.typed import met
from counterpoint.transport.wires.endpoint import IPC, CurveKeys, socket_path

logger = logging.getLogger(__name__)

MOST_CALLS = 256
"""Calls of one caller that run or wait to run. It holds back what it calls beyond; what comes nevertheless is refused."""

END_SECONDS = 5.0
"""How long a server that ends waits for its threads."""

HELLO = b"HELLO"
"""The first frame of what a caller asks first; `read_methods` reads the answer."""

RAISED, REFUSED = "raised ", "refused"
"""How a call fails: the method raised, and the exception's type follows; another incarnation is there. `BUSY`: a method hangs."""

_GRACE_SECONDS = 1.0
"""How long a method may run beyond the deadline of its call before others are no longer kept waiting for it."""

Name = Annotated[str, Meta(max_length=256)]


class CallHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first frame of a call; those of `[args, kwargs]` follow, by `codec.py`."""

    caller: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """Random; with the number, it names the call, also when it is sent again."""
    number: Annotated[int, Meta(ge=0)]
    worker: Name
    incarnation: int
    """The worker that is meant; another one refuses."""
    method: Name


# Made here, in one thread: msgspec does not bear that several meet a type first.
read_header = msgspec.msgpack.Decoder(met(CallHeader)).decode
read_methods = msgspec.msgpack.Decoder(met(dict[Name, bool])).decode
"""Reads what a worker offers: whether each method is idempotent."""

Key = tuple[bytes, int]
"""The caller of a call, and the call's number."""

Reply = Callable[[PeerAsk], object]
"""Answers what was asked."""


@dataclass(slots=True, eq=False)
class _Call:
    """A call that waits or runs. One that is sent again meanwhile does not run again: its newest ask is answered."""

    key: Key
    ask: PeerAsk
    method: Method


def call_address(directory: Path, worker: str) -> str:
    """Returns the address at which a worker of the job in `directory` takes calls from this machine.

    It is the same for all its incarnations, so that none leaves a file behind. Raises `PermissionError` when the directory for
    paths that are too long for a socket is another user's.
    """
    return IPC + str(socket_path(directory.resolve(), f"{worker}.calls"))


class CallServer:
    """Answers calls to the remote methods of `target`, which is worker `worker` in its `incarnation`.

    `address` is `ipc://PATH` (`call_address` makes one) or, with `keys`, any `tcp://HOST:*`: there only peers whose public keys
    were given to `authorize` connect. Use it in a `with` statement, or `start` and `close` it.
    """

    def __init__(
        self,
        target: object,
        worker: str,
        incarnation: int,
        address: str,
        keys: CurveKeys | None = None,
        max_frame_bytes: int = MOST_BYTES,
    ) -> None:
        self._target, self._worker, self._incarnation = target, worker, incarnation
        self._methods = methods_of(type(target))
        self.address, self._keys, self._max_frame_bytes = address, keys, max_frame_bytes
        self._calls: dict[Key, _Call] = {}
        self._log = RateLimitedLog(logger)
        self._waiting: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._running: _Call | None = None
        """The plain method that runs."""
        self._told: _Call | None = None
        """The latest one that was logged as hanging."""
        self._plain = threading.Thread(target=self._run_plain, name=f"calls-run-{worker}", daemon=True)
        self._loop: LoopThread | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    def start(self) -> str:
        """Listens; returns the address to connect to.

        Raises `OSError` when it cannot listen, `ValueError` for an address that other machines reach, without keys.
        """
        if not self.address.startswith(IPC) and self._keys is None:
            raise ValueError(f"{self.address} is reachable from other machines and needs CURVE keys; use ipc://")
        self._io = LoopThread(f"calls-{self._worker}")
        try:
            self._io.run(self._listen()).result()
        except BaseException:
            self._io.close(END_SECONDS)
            raise
        self._plain.start()
        return self.address

    def authorize(self, public_keys: Sequence[bytes]) -> None:
        """Lets exactly the peers with these keys connect from now on. Without keys of its own, it lets everyone of this user."""
        if isinstance(self._listener, CurveListener):
            self._listener.authorize(public_keys)

    def close(self, seconds: float = END_SECONDS) -> None:
        """Ends. What a caller has not read of a long answer is lost; a method that does not end in `seconds` is left behind."""
        if self._closing:
            return
        self._closing = True
        self._waiting.put(None)
        self._io.post(self._listener.close)
        ended = [self._io.close(END_SECONDS), self._loop is None or self._loop.close(seconds)]
        self._plain.join(seconds)
        if self._plain.is_alive() or not all(ended):
            logger.warning("%s: a method does not end, and is abandoned%s", self._worker, _line_of(self._plain))

    def __enter__(self) -> CallServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- in the thread of the connections ---

    async def _listen(self) -> None:
        self._listener: UnixListener | CurveListener
        if self._keys is None:
            self._listener = UnixListener(self._take, MOST_CALLS, self._max_frame_bytes)
            await self._listener.start(self.address.removeprefix(IPC))
        else:
            self._listener = CurveListener(self.address, self._keys, self._take, MOST_CALLS, self._max_frame_bytes)
            self.address = self._listener.address
        self._watch = asyncio.ensure_future(self._refuse_behind_hung())

    def _take(self, ask: PeerAsk) -> None:
        try:
            first = as_bytes_view(ask.frames[0])
            if first == HELLO:
                offered = {method.name: method.idempotent for method in self._methods.values()}
                ask.answer([msgspec.msgpack.encode(offered)])
                return
            header = read_header(first)
        except (ValueError, LookupError) as error:
            said = f"{self._worker} refused a message of a caller: {str(error)[:200]}"
            self._log.note(logging.WARNING, said)
            ask.fail(f"{RAISED}CodecError", said)
            return
        if (header.worker, header.incarnation) != (self._worker, self._incarnation):
            ask.fail(REFUSED, f"incarnation {self._incarnation} of {self._worker} answers")
            return
        if (method := self._methods.get(header.method)) is None:
            known, kind = ", ".join(sorted(self._methods)) or "none", type(self._target).__name__
            said = f"AttributeError: {kind} has no method {header.method!r:.80} marked @remote; marked are: {known}"
            ask.fail(f"{RAISED}AttributeError", said)
            return
        key = header.caller, header.number
        if (open_call := self._calls.get(key)) is not None:
            before, open_call.ask = open_call.ask, ask
            before.fail(LOST, "it was sent again")
            return
        call = self._calls[key] = _Call(key, ask, method)
        if not method.is_async:
            self._waiting.put(call)
            return
        if self._loop is None:
            self._loop = LoopThread(f"calls-loop-{self._worker}")
        self._loop.post(self._begin_task, call)

    async def _refuse_behind_hung(self) -> None:
        """Refuses the plain methods that wait behind one whose caller has given up: nobody knows whether it ever ends."""
        while True:
            await asyncio.sleep(_GRACE_SECONDS)
            hung = self._running
            if hung is None or (late := time.monotonic() - hung.ask.deadline) < _GRACE_SECONDS:
                continue
            where = _line_of(self._plain)
            if hung is not self._told:
                self._told = hung
                logger.warning("%s refuses plain methods: `%s` hangs%s", self._worker, hung.method.name, where)
            said = f"`{hung.method.name}` still runs {late:.0f} s after the deadline of its call{where}"
            with suppress(queue.Empty):
                while (call := self._waiting.get_nowait()) is not None:
                    self._end(call, partial(PeerAsk.fail, kind=BUSY, text=said))

    def _end(self, call: _Call, reply: Reply) -> None:
        del self._calls[call.key]
        reply(call.ask)

    # --- in the other threads ---

    def _run_plain(self) -> None:
        while (call := self._waiting.get()) is not None and not self._closing:
            reply: Reply = _late
            if call.ask.deadline >= time.monotonic():
                self._running = call
                try:
                    args, kwargs = _arguments(call)
                    reply = _result(call, getattr(self._target, call.method.name)(*args, **kwargs))
                except BaseException as error:  # noqa: BLE001 - SystemExit, too, is the caller's to know, and costs one call
                    reply = _raised(error)
                self._running = None
            self._io.post(self._end, call, reply)

    def _begin_task(self, call: _Call) -> None:
        task = asyncio.get_running_loop().create_task(self._await(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _await(self, call: _Call) -> None:
        limit = asyncio.timeout_at(call.ask.deadline)
        try:
            args, kwargs = _arguments(call)
            async with limit:
                reply = _result(call, await getattr(self._target, call.method.name)(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - as above
            reply = _late if limit.expired() else _raised(error)
        self._io.post(self._end, call, reply)


def _late(ask: PeerAsk) -> None:
    ask.fail(LATE, "its deadline has passed")


def _line_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return f", at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""


def _arguments(call: _Call) -> tuple[list[Any], dict[str, Any]]:
    match codec.decode(call.ask.frames[1:]):
        case [list(args), dict(kwargs)] if all(type(name) is str for name in kwargs):
            return args, kwargs
        case _:
            raise CodecError("the value of a call is not [args, kwargs]")


def _result(call: _Call, value: object) -> Reply:
    if inspect.isawaitable(value):
        raise TypeError(f"{call.method.name} returned {type(value).__name__}; mark the `async def` itself as @remote")
    frames = [frame if isinstance(frame, bytes) else bytes(frame) for frame in codec.encode(value, "result")]
    return partial(PeerAsk.answer, frames=frames)


def _raised(error: BaseException) -> Reply:
    """Returns the answer that says what the method raised. The first frame of the traceback, which is ours, is left out."""
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
    lines = traceback.TracebackException(type(error), error, trace)
    kind, message = RAISED + type(error).__qualname__, "".join(lines.format_exception_only()).strip()
    return partial(PeerAsk.fail, kind=kind, text=message, trace="".join(lines.format()))
