"""The callee's end: a socket in the worker's process, and the threads in which its methods run.

One thread owns the socket. Plain methods run in another one, one at a time and in order; `async def` methods on a loop in a
third, which starts with the first such call. `caller.py` is the other end, `remote.py` says what may be called.
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
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from counterpoint.cluster.calls import codec, messages
from counterpoint.cluster.calls.codec import CodecError
from counterpoint.cluster.calls.messages import CallHeader
from counterpoint.cluster.calls.remote import Method, methods_of
from counterpoint.cluster.calls.server_socket import ServerSocket
from counterpoint.cluster.calls.waker import Waker
from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.rate_limited_log import RateLimitedLog
from counterpoint.transport.wires.endpoint import CurveKeys

logger = logging.getLogger(__name__)

MOST_CALLS = 256
"""Calls that run or wait to run. With more, the socket is not read, and callers hold theirs back."""

MAX_FRAME_BYTES = 2**32
"""Largest array of a call. A peer that claims more is dropped before memory is allocated."""

_RECEIVED_AT_ONCE = 32
_WAIT_SECONDS = 1.0
END_SECONDS = 5.0
"""How long a server that ends waits for its threads."""

_LONGEST_SECONDS = 1e6

_GRACE_SECONDS = 1.0
"""How long a method may run beyond the deadline of its call before others are no longer kept waiting for it."""


Key = tuple[bytes, int]
"""The caller of a call, and the call's number."""

KEPT_ANSWERS, KEPT_BYTES = 256, 16 * 2**20
"""Most answers kept, and most bytes of them. A larger answer is not kept: its method runs again, which does no harm."""


class Answers:
    """The calls that run, and the latest answers, so that a call that is sent again does not run again. Pure, and bounded.

    A call that still runs is answered once, to where its caller now is. Only calls of idempotent methods are sent again, so their
    answers are kept for a while.
    """

    def __init__(self) -> None:
        self._running: dict[Key, bytes] = {}
        self._kept: OrderedDict[Key, tuple[Sequence[Buffer], int]] = OrderedDict()
        self._kept_bytes = 0

    def __len__(self) -> int:
        """How many calls run, or wait to run."""
        return len(self._running)

    def begin(self, key: Key, sender: bytes) -> Sequence[Buffer] | bool:
        """Returns the answer if there is one, else whether the call is new and is to be run."""
        if (kept := self._kept.get(key)) is not None:
            return kept[0]
        new = key not in self._running
        self._running[key] = sender
        return new

    def end(self, key: Key, answer: Sequence[Buffer] | None, keep: bool) -> bytes:
        """Notes the answer of a call, None if it was dropped; returns the connection to send it to, by now perhaps another."""
        sender = self._running.pop(key)
        if answer is None:
            return sender
        size = sum(as_bytes_view(frame).nbytes for frame in answer)
        if keep and size <= KEPT_BYTES:
            self._kept[key] = (answer, size)
            self._kept_bytes += size
            while len(self._kept) > KEPT_ANSWERS or self._kept_bytes > KEPT_BYTES:
                self._kept_bytes -= self._kept.popitem(last=False)[1][1]
        return sender


@dataclass(slots=True)
class _Call:
    """A call that arrived."""

    header: CallHeader
    frames: Sequence[Buffer]
    method: Method
    deadline: float


class CallServer:
    """Answers calls to the remote methods of `target`, which is worker `worker` in its `incarnation`.

    `address` is `ipc://PATH` (`call_address` makes one) or `tcp://127.0.0.1:*`. With `keys` it may be any `tcp://HOST:*`; then
    only peers whose public keys were given to `authorize` connect. Use it in a `with` statement, or `start` and `close` it.
    """

    def __init__(
        self,
        target: object,
        worker: str,
        incarnation: int,
        address: str,
        keys: CurveKeys | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._target, self._worker, self._incarnation = target, worker, incarnation
        self._methods = methods_of(type(target))
        self._address, self._keys, self._max_frame_bytes = address, keys, max_frame_bytes
        self._socket: ServerSocket | None = None
        self._answers = Answers()
        self._log = RateLimitedLog(logger)
        self._waiting: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._running: _Call | None = None
        """The plain method that runs."""
        self._told: _Call | None = None
        """The latest one that was logged as hanging."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads: list[threading.Thread] = []
        self._closing = False
        self.address = ""
        """The address at which it listens, once it was started."""

    def start(self) -> str:
        """Listens; returns the address to connect to.

        Raises `OSError` when it cannot listen, `ValueError` for an address that other machines reach, without keys.
        """
        self._socket = ServerSocket(self._address, self._keys, self._max_frame_bytes)
        self.address = self._socket.address
        self._waker = Waker()
        self._start_thread(self._serve, "calls")
        self._start_thread(self._run_plain, "calls-run")
        return self.address

    def authorize(self, public_keys: Sequence[bytes]) -> None:
        """Lets exactly the peers with these keys connect from now on. Without keys of its own, it lets everyone."""
        assert self._socket is not None
        self._socket.authorize(public_keys)

    def close(self, seconds: float = END_SECONDS) -> None:
        """Ends, after so many seconds at most for a method that runs. Its caller learns that this worker is gone."""
        if self._socket is None or self._closing:
            return
        self._closing = True
        self._waker.post(lambda: None)
        serving, *running = self._threads
        serving.join(END_SECONDS)  # first, as it gives work to the others
        self._waiting.put(None)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            running = self._threads[1:]
        for thread in running:
            thread.join(seconds)
        if alive := [thread.name for thread in self._threads if thread.is_alive()]:
            logger.warning("%s: a method does not end; abandoned: %s", self._worker, ", ".join(alive))
        else:
            self._waker.close()

    def __enter__(self) -> CallServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_thread(self, function: Any, name: str) -> None:
        thread = threading.Thread(target=function, name=f"{name}-{self._worker}", daemon=True)
        self._threads.append(thread)
        thread.start()

    # --- in the socket's thread ---

    def _serve(self) -> None:
        assert self._socket is not None
        try:
            while not self._closing:
                readable = self._socket.poll(self._waker.descriptor, len(self._answers) < MOST_CALLS, _WAIT_SECONDS)
                for work in self._waker.take():
                    work()
                if readable:
                    for sender, frames in self._socket.receive(_RECEIVED_AT_ONCE):
                        self._receive(sender, frames)
                self._refuse_behind_hung()
        except Exception:
            logger.exception("%s no longer answers calls: its thread failed", self._worker)
            raise
        finally:
            self._socket.close()

    def _receive(self, sender: bytes, frames: Sequence[Buffer]) -> None:
        kind = bytes(as_bytes_view(frames[0])[:16]) if frames else b""
        try:
            if kind == messages.HELLO:
                methods = {method.name: method.idempotent for method in self._methods.values()}
                self._send(sender, messages.methods_message(self._worker, self._incarnation, methods))
            elif kind == messages.CALL and len(frames) >= 3:
                self._take(sender, CallHeader.unpack(frames[1]), frames[2:])
            else:
                raise CodecError(f"{len(frames)} frames that begin with {kind!r}")
        except CodecError as error:
            self._log.note(logging.WARNING, f"{self._worker} dropped a message of a caller: {error}")

    def _take(self, sender: bytes, header: CallHeader, frames: Sequence[Buffer]) -> None:
        if (header.worker, header.incarnation) != (self._worker, self._incarnation):
            said = f"incarnation {self._incarnation} of {self._worker} answers"
            self._send(sender, [messages.REFUSED, messages.pack(header.number, said)])
            return
        method = self._methods.get(header.method)
        if method is None:
            known, kind = ", ".join(sorted(self._methods)) or "none", type(self._target).__name__
            said = f"AttributeError: {kind} has no method {header.method!r:.80} marked @remote; marked are: {known}"
            said = said[: messages.LONGEST_MESSAGE]
            self._send(sender, [messages.RAISED, messages.pack(header.number, "AttributeError", said, "")])
            return
        new = self._answers.begin((header.caller, header.number), sender)
        if not isinstance(new, bool):
            self._send(sender, new)
        elif new:
            call = _Call(header, frames, method, time.monotonic() + min(header.seconds, _LONGEST_SECONDS))
            if method.is_async:
                self._run_async(call)
            else:
                self._waiting.put(call)

    def _refuse_behind_hung(self) -> None:
        """Refuses the plain methods that wait behind one whose caller has given up: nobody knows whether it ever ends."""
        hung = self._running
        if hung is None or (late := time.monotonic() - hung.deadline) < _GRACE_SECONDS:
            return
        where = _line_of(self._threads[1])
        if hung is not self._told:
            self._told = hung
            logger.warning("%s refuses plain methods: `%s` hangs%s", self._worker, hung.method.name, where)
        said = f"`{hung.method.name}` still runs {late:.0f} s after the deadline of its call{where}"
        with suppress(queue.Empty):
            while (call := self._waiting.get_nowait()) is not None:
                self._answer(call, [messages.BUSY, messages.pack(call.header.number, said)], keep=False)

    def _answer(self, call: _Call, answer: Sequence[Buffer] | None, keep: bool) -> None:
        sender = self._answers.end((call.header.caller, call.header.number), answer, keep)
        if answer is not None:
            self._send(sender, answer)

    def _send(self, sender: bytes, frames: Sequence[Buffer]) -> None:
        assert self._socket is not None
        if not self._socket.send(sender, frames):
            self._log.note(logging.INFO, f"{self._worker} dropped an answer: its caller is gone or does not read")

    # --- in the other threads ---

    def _run_plain(self) -> None:
        while (call := self._waiting.get()) is not None and not self._closing:
            if call.deadline < time.monotonic():
                self._post(call, None)
                continue
            self._running = call
            try:
                args, kwargs = _arguments(call)
                answer = _result(call, getattr(self._target, call.method.name)(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - SystemExit, too, is the caller's to know, and costs one call
                answer = _raised(call, error)
            self._running = None
            self._post(call, answer)

    def _run_async(self, call: _Call) -> None:
        if self._loop is None:
            self._loop = uvloop.new_event_loop()
            self._start_thread(self._run_loop, "calls-loop")
        self._loop.call_soon_threadsafe(self._begin_task, call)

    def _run_loop(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._cancel_tasks())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def _begin_task(self, call: _Call) -> None:
        assert self._loop is not None
        task = self._loop.create_task(self._await(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _await(self, call: _Call) -> None:
        answer: Sequence[Buffer] | None
        limit = asyncio.timeout_at(call.deadline)
        try:
            args, kwargs = _arguments(call)
            async with limit:
                answer = _result(call, await getattr(self._target, call.method.name)(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - as above
            answer = None if limit.expired() else _raised(call, error)
        self._post(call, answer)

    def _post(self, call: _Call, answer: Sequence[Buffer] | None) -> None:
        """Has the answer sent; None: the caller's deadline has passed, which it knows itself."""
        if not self._closing:
            self._waker.post(lambda: self._answer(call, answer, call.method.idempotent))


def _line_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return f", at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""


def _arguments(call: _Call) -> tuple[list[Any], dict[str, Any]]:
    match codec.decode(call.frames):
        case [list(args), dict(kwargs)] if all(type(name) is str for name in kwargs):
            return args, kwargs
        case _:
            raise CodecError("the value of a call is not [args, kwargs]")


def _result(call: _Call, value: object) -> list[Buffer]:
    if inspect.isawaitable(value):
        raise TypeError(f"{call.method.name} returned {type(value).__name__}; mark the `async def` itself as @remote")
    frames = [frame if isinstance(frame, bytes) else bytes(frame) for frame in codec.encode(value, "result")]
    return [messages.RESULT, messages.pack(call.header.number), *frames]


def _raised(call: _Call, error: BaseException) -> list[Buffer]:
    """Returns the answer that says what the method raised. The first frame of the traceback, which is ours, is left out."""
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
    lines = traceback.TracebackException(type(error), error, trace)
    text = "".join(lines.format())[-messages.LONGEST_TRACEBACK :]
    message = "".join(lines.format_exception_only()).strip()[: messages.LONGEST_MESSAGE]
    fields = (type(error).__qualname__[:256], message, text)
    safe = [field.encode(errors="backslashreplace").decode() for field in fields]
    return [messages.RAISED, messages.pack(call.header.number, *safe)]
