"""The caller's end of all calls of a process: a loop in one thread, which has the connections, and carries each call.

`group.py` is what users see of it. The worker's process makes one `Caller`, gives it each list of members that it is told, and
closes it. `server.py` is the other end.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import InvalidStateError
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from counterpoint.cluster.calls.call import Call
from counterpoint.cluster.calls.codec import CodecError, decode
from counterpoint.cluster.calls.server import HELLO, MOST_CALLS, RAISED, REFUSED, CallHeader, read_methods
from counterpoint.cluster.errors import (
    ActorBusy,
    ActorDied,
    ActorRestarting,
    CallError,
    CallTimeout,
    NoSuchActor,
    RemoteError,
)
from counterpoint.cluster.member import Member, Stage
from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.rpc.connection import BUSY, LATE, LOST, MOST_BYTES, Connection, RpcError
from counterpoint.transport.rpc.curve import connect_curve
from counterpoint.transport.rpc.loop_thread import LoopThread
from counterpoint.transport.rpc.stream import connect_unix
from counterpoint.transport.wires.endpoint import IPC, CurveKeys

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 2.0
"""Seconds between two looks at a connection. Within two of them, silence ends a call."""

CLOSED = "the calls of this process were closed"

_END_SECONDS = 5.0
_LONGEST_SECONDS = 1e6
_LIMITS = MOST_BYTES, MOST_CALLS
_BACKOFF_SECONDS = (0.05, 1.0)
_JITTER = random.Random()
"""Its own, as another thread must not disturb the sequence that a test has seeded."""


@dataclass(slots=True, eq=False)
class _Request:
    """A call, with what is needed to send it (again)."""

    number: int
    role: str
    worker: str
    """The worker that is wanted, empty for any."""
    is_fixed: bool
    """Whether no other will do."""
    method: str
    frames: Sequence[Buffer]
    timeout: float
    call: Call[Any] = field(default_factory=Call)
    deadline: float = 0.0

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.timeout

    def __str__(self) -> str:
        return f"{self.worker or self.role}.{self.method}"

    @property
    def seconds_left(self) -> float:
        """How long the caller still waits."""
        return self.deadline - time.monotonic()

    def end(self, task: asyncio.Task[Any]) -> None:
        """Ends the call as what has carried it, unless it was cancelled meanwhile."""
        with suppress(InvalidStateError):
            if task.cancelled():
                self.call.set_exception(CallError(f"{self}: {CLOSED}"))
            elif (error := task.exception()) is not None:
                self.call.set_exception(error.with_traceback(None))  # which would keep the arguments in memory
            else:
                self.call.set_result(task.result())


@dataclass(slots=True, eq=False)
class Peer:
    """One worker of a role that this process calls, over all its incarnations."""

    role: str
    member: Member
    connection: Connection | None = None
    """Once the worker has answered."""
    connecting: asyncio.Task[None] | None = None
    """Connects, and connects again."""
    trouble: str = ""
    """Why the address does not answer; empty as long as it may."""
    has_left: bool = False
    gate: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Calls that wait for the connection pass one after the other, so that they are sent in order."""
    queued: int = 0
    """How many wait there."""

    def __str__(self) -> str:
        return f"{self.member.worker} (incarnation {self.member.incarnation})"

    @property
    def is_gone(self) -> bool:
        """Whether it will not take calls any more."""
        return self.has_left or (not self.member.address and self.member.stage in (Stage.FINISH, Stage.FAILED))

    @property
    def why_not(self) -> str:
        """Why it takes no calls now, for people."""
        is_up = self.member.stage in (Stage.READY, Stage.RUNNING)
        return self.trouble or ("it has no method marked @remote" if is_up else f"it is {self.member.stage}")

    @property
    def is_connected(self) -> bool:
        """Whether a call can be sent to it now."""
        return self.connection is not None and not self.connection.ended.done()

    @property
    def takes_calls(self) -> bool:
        """Whether a call may be given to it: its address answers, or is new, and calls wait for it for two heartbeats."""
        return self.is_connected or (bool(self.member.address) and not self.trouble and not self.is_gone)


class Caller:
    """Carries the calls of `RoleGroup`s. Use it in a `with` statement, or `close` it."""

    def __init__(self, keys: CurveKeys | None = None, heartbeat_seconds: float = HEARTBEAT_SECONDS) -> None:
        self._keys, self._heartbeat_seconds = keys, heartbeat_seconds
        self._name = os.urandom(16)
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        """Guards what several threads use: the members, the roles, the thread, and whether it was closed."""
        self._members: dict[str, Member] = {}
        self._roles: set[str] = set()
        self._thread: LoopThread | None = None
        self._is_closed = False
        # What follows is for the loop alone.
        self._peers: dict[str, Peer] = {}
        self._news = asyncio.Event()
        """Set, and replaced, when a member or a connection has changed."""
        self._methods: dict[str, dict[str, bool]] = {}
        """Whether each method of a role is idempotent, as its workers told."""
        self._turns: defaultdict[str, int] = defaultdict(int)

    # --- in any thread ---

    def follow(self, role: str) -> None:
        """Begins to connect to the workers of a role. Raises `CallError` once it is closed."""
        with self._changed:
            self._require_open(f"calls to {role}")
            if self._thread is None:
                self._thread = LoopThread("calls-out")
            if role not in self._roles:
                self._roles.add(role)
                self._thread.post(self._follow_members)

    def _require_open(self, what: str) -> None:
        if self._is_closed:
            raise CallError(f"{what}: {CLOSED}")

    def update(self, members: Sequence[Member]) -> None:
        """Takes the list of all members of the job. One that names an older incarnation of a worker does not bring it back."""
        with self._changed:
            known = self._members
            self._members = {
                member.worker: max(member, known.get(member.worker, member), key=lambda found: found.incarnation)
                for member in members
            }
            self._changed.notify_all()
            if self._thread is not None and not self._is_closed:
                self._thread.post(self._follow_members)

    def members(self, role: str) -> Sequence[Member]:
        """Returns the workers of a role as last known, by rank; a role's SubMaster has its own name as its role."""
        found = [member for member in self._members.values() if _role(member) == role]
        return sorted(found, key=_rank)

    def wait_until_callable(self, role: str, timeout: float) -> None:
        """See `RoleGroup`."""

        def missing() -> list[str]:
            members = [member for member in self.members(role) if member.stage != Stage.FINISH]
            return [f"{member.worker} ({member.stage})" for member in members if not member.address]

        with self._changed:
            if not self._changed.wait_for(lambda: self._is_closed or (self.members(role) and not missing()), timeout):
                names = ", ".join(missing()) or "no worker of the role is known"
                raise CallTimeout(f"{role}: after {timeout:g} s some workers take no calls: {names}")
            self._require_open(f"calls to {role}")

    def send(
        self, role: str, worker: str, fixed: bool, method: str, frames: Sequence[Buffer], timeout: float
    ) -> Call[Any]:
        """Sends a call to `worker`, or if it is not `fixed` or empty to any of the role."""
        request = _Request(next(self._numbers), role, worker, fixed, method, frames, timeout)
        with self._changed:
            self._require_open(f"{role}.{method}")
            assert self._thread is not None  # since `follow`
            self._thread.post(self._begin, request)
        return request.call

    def close(self) -> None:
        """Ends; calls in flight fail with `CallError`."""
        with self._changed:
            thread, self._thread, self._is_closed = self._thread, None, True
            self._changed.notify_all()
        if thread is not None and not thread.close(_END_SECONDS):
            logger.warning("the thread of calls did not end within %g s and is abandoned", _END_SECONDS)

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- on the loop: members and connections ---

    def _tell(self) -> None:
        """Wakes the calls that wait."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _follow_members(self) -> None:
        members = {member.worker: member for role in self._roles for member in self.members(role)}
        for worker in members.keys() | self._peers.keys():
            member, peer = members.get(worker), self._peers.get(worker)
            if peer is None:
                peer = self._peers[worker] = Peer(_role(members[worker]), members[worker])
            elif member is None or _place(member) != _place(peer.member):
                said = f"its incarnation {member.incarnation} is {member.stage}" if member else "it left the job"
                if peer.connecting is not None:
                    peer.connecting.cancel()
                if peer.connection is not None:
                    peer.connection.close(said)
                peer.connection, peer.connecting, peer.trouble = None, None, ""
            peer.has_left, peer.member = member is None, member or peer.member
            if peer.member.address and not peer.has_left and peer.connecting is None:
                peer.connecting = asyncio.ensure_future(self._keep_connected(peer))
        self._tell()

    async def _keep_connected(self, peer: Peer) -> None:
        """Connects to one incarnation, and again when the connection breaks. Calls wait for the first one for two heartbeats."""
        patience = 2 * self._heartbeat_seconds
        until, failures = time.monotonic() + patience, 0
        while True:
            seconds = patience if peer.trouble else max(0.0, until - time.monotonic())
            try:
                connection = await self._connect(peer, seconds)
            except (OSError, RpcError, ValueError, LookupError) as error:  # the latter: an answer that makes no sense
                failures += 1
                is_final = isinstance(error, OSError) and error.errno == errno.EINVAL
                if is_final or time.monotonic() >= until:
                    peer.trouble = f"{peer.member.address} does not answer: {error}"
            else:
                failures, peer.trouble, peer.connection = 0, "", connection
                self._tell()
                try:
                    peer.trouble = await asyncio.shield(connection.ended)
                finally:
                    connection.close()
                logger.info("lost %s: %s", peer, peer.trouble)
                peer.connection = None
            self._tell()
            first, longest = _BACKOFF_SECONDS
            await asyncio.sleep(min(longest, first * 2 ** min(failures, 16)) * _JITTER.uniform(0.5, 1.0))

    async def _connect(self, peer: Peer, seconds: float) -> Connection:
        member, beat = peer.member, self._heartbeat_seconds
        if member.address.startswith(IPC):
            connection = await connect_unix(member.address.removeprefix(IPC), str(peer), beat, *_LIMITS)
        elif self._keys is None:
            raise OSError(errno.EINVAL, f"Invalid argument: {member.address!r} needs keys")
        else:
            connection = connect_curve(member.address, member.server_key, self._keys, str(peer), beat, *_LIMITS)
        try:
            methods, *_ = await connection.ask([HELLO], seconds)
            self._methods[peer.role] = read_methods(as_bytes_view(methods))
        except BaseException:
            connection.close()
            raise
        return connection

    # --- on the loop: calls ---

    def _begin(self, request: _Request) -> None:
        asyncio.get_running_loop().create_task(self._carry(request)).add_done_callback(request.end)

    async def _carry(self, request: _Request) -> Any:
        """Sends a call, also again if it is repeatable, and returns what the method returned. Raises `CallError`."""
        peer: Peer | None = None
        busy: set[str] = set()
        while not request.call.done():  # it may be cancelled
            if peer is None or not peer.takes_calls:
                peer = self._choose(request)
            if peer is None and self._members:
                raise NoSuchActor(f"{request}: {self._missing(request)}; the method was not sent")
            if peer is not None and peer.takes_calls:
                if peer.queued or not peer.is_connected:
                    await self._wait_in_turn(request, peer)
                if peer.connection is None or not peer.is_connected:
                    continue
                name = str(peer)
                try:
                    return decode(await self._ask(request, peer.member, peer.connection))
                except CodecError as error:
                    said = f"{request}: the result of {name} cannot be read: {error}"
                    raise RemoteError(said, "CodecError") from None
                except RpcError as failure:
                    peer = self._after(failure, request, peer, name, busy)
                    if failure.kind != REFUSED:
                        continue
            elif peer is not None and peer.is_gone:
                raise ActorDied(f"{request}: {peer} takes no calls any more; the method was not sent")
            elif not self._is_repeatable(request):
                said = f"{peer} takes no calls now: {peer.why_not}" if peer else "no worker of the job is known yet"
                raise ActorRestarting(f"{request}: {said}; the method was not sent")
            async with self._in_time(request):
                await self._news.wait()

    async def _wait_in_turn(self, request: _Request, peer: Peer) -> None:
        """Waits, in the order of calls, until the worker is connected, or takes no calls after all."""
        peer.queued += 1
        try:
            async with self._in_time(request), peer.gate:
                while peer.takes_calls and not peer.is_connected:
                    await self._news.wait()
        finally:
            peer.queued -= 1

    def _ask(self, request: _Request, member: Member, connection: Connection) -> asyncio.Future[list[Buffer]]:
        header = CallHeader(self._name, request.number, member.worker, member.incarnation, request.method)
        return connection.ask([msgspec.msgpack.encode(header), *request.frames], request.seconds_left)

    @asynccontextmanager
    async def _in_time(self, request: _Request) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(min(request.seconds_left, _LONGEST_SECONDS)):
                yield
        except TimeoutError:
            raise CallTimeout(f"{request}: it was not sent within {request.timeout:g} s") from None

    def _after(self, failure: RpcError, request: _Request, peer: Peer, name: str, busy: set[str]) -> Peer | None:
        """Returns to whom a call goes next that `name` has failed, None for anybody; raises if it goes to nobody."""
        if failure.kind == LATE:
            raise CallTimeout(f"{request}: no answer within {request.timeout:g} s") from None
        if failure.kind in (LOST, REFUSED) and self._is_repeatable(request):
            return None
        if failure.kind == LOST:
            said = f"{name} died or is silent ({failure}), and nobody knows whether the method ran"
            raise ActorDied(f"{request}: {said}") from None
        if failure.kind == REFUSED:
            raise ActorRestarting(f"{request}: {name} is not there, {failure}; the method was not run") from None
        if failure.kind == BUSY:
            busy.add(peer.member.worker)
            peers = [other for other in self._peers.values() if other.role == request.role and other.takes_calls]
            others = [other for other in peers if other.member.worker not in busy]
            if others and not request.is_fixed:
                return others[0]
            raise ActorBusy(f"{request}: {name} is busy: {failure}; the method was not run") from None
        raised = RemoteError(f"{request}: {name} raised {failure}", failure.kind.removeprefix(RAISED), failure.trace)
        if failure.trace:
            raised.add_note(f"The traceback in {name}:\n{failure.trace}")
        raise raised from None

    def _choose(self, request: _Request) -> Peer | None:
        """Returns the worker whose turn it is: one that takes calls, else one that may again."""
        named = self._peers.get(request.worker)
        if request.is_fixed or (named is not None and named.takes_calls):
            return named
        peers = [peer for peer in self._peers.values() if peer.role == request.role]
        best = [peer for peer in peers if peer.takes_calls]
        best = best or [peer for peer in peers if not peer.is_gone] or peers
        self._turns[request.role] += 1
        return best[self._turns[request.role] % len(best)] if best else None

    def _missing(self, request: _Request) -> str:
        workers = ", ".join(member.worker for member in self.members(request.role))
        if workers:
            return f"the job has no such worker; those of the role are {workers}"
        roles = ", ".join(sorted({_role(member) for member in self._members.values()} - {""}))
        return f"the job has no worker of the role {request.role}; its roles are {roles}"

    def _is_repeatable(self, request: _Request) -> bool:
        return self._methods.get(request.role, {}).get(request.method, False)


def _place(member: Member) -> tuple[int, str]:
    return member.incarnation, member.address


def _role(member: Member) -> str:
    """Returns the role of a worker; its own name for a SubMaster."""
    role, _, rank = member.worker.rpartition("-")
    return role if rank.isdecimal() else member.worker


def _rank(member: Member) -> int:
    """Returns the rank of a worker; -1 for a SubMaster."""
    rank = member.worker.rpartition("-")[2]
    return int(rank) if rank.isdecimal() else -1
