"""The caller's end of all calls of a process: a loop in one thread, which has the connections and decides about each call.

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
from collections.abc import Sequence
from concurrent.futures import InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from counterpoint.cluster.calls.call import Call
from counterpoint.cluster.calls.codec import CodecError, decode
from counterpoint.cluster.calls.group import RoleGroup
from counterpoint.cluster.calls.server import HELLO, METHODS, MOST_CALLS, RAISED, REFUSED, CallHeader
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

_END_SECONDS = 5.0
_LIMITS = MOST_BYTES, MOST_CALLS
_BACKOFF_SECONDS = (0.05, 1.0)
_JITTER = random.Random()
"""Its own, as another thread must not disturb the sequence that a test has seeded."""


class Request:
    """A call, with what is needed to send it (again)."""

    def __init__(
        self, number: int, role: str, worker: str, fixed: bool, method: str, frames: Sequence[Buffer], timeout: float
    ) -> None:
        self.call: Call[Any] = Call()
        self.number, self.role, self.method, self.frames, self.timeout = number, role, method, frames, timeout
        self.worker, self.is_fixed = worker, fixed
        """The worker that is wanted, empty for any; whether no other will do."""
        self.deadline = time.monotonic() + timeout
        self.timer: asyncio.TimerHandle | None = None
        self.answer: asyncio.Future[list[Buffer]] | None = None
        """While it is sent."""
        self.queue: dict[Request, None] = {}
        """Where it waits, else."""
        self.busy: set[str] = set()
        """The workers that did not run it because an earlier method hangs there."""

    def __str__(self) -> str:
        return f"{self.worker or self.role}.{self.method}"

    def wait_in(self, queue: dict[Request, None]) -> None:
        """Waits there until it is routed again, or ends."""
        queue[self] = None
        self.queue = queue

    def end(self, result: object) -> None:
        """Ends the call with a result or an error, unless it was cancelled meanwhile."""
        self.queue.pop(self, None)
        self.frames = ()
        if self.timer is not None:
            self.timer.cancel()
        if self.answer is not None:
            self.answer.cancel()
        with suppress(InvalidStateError):
            if isinstance(result, CallError):
                self.call.set_exception(result)
            else:
                self.call.set_result(result)


class Peer:
    """One worker of a role that this process calls, over all its incarnations."""

    def __init__(self, member: Member) -> None:
        self.role, self.member = _role(member), member
        self.connection: Connection | None = None
        """Once the worker has answered."""
        self.connecting: asyncio.Task[None] | None = None
        """Connects, and connects again."""
        self.waiting: dict[Request, None] = {}
        """Calls that wait for the connection."""
        self.trouble = ""
        """Why the address does not answer; empty as long as it may."""
        self.has_left = False

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
    def takes_calls(self) -> bool:
        """Whether a call may be given to it: its address answers, or is new, and calls wait for it for two heartbeats."""
        return self.connection is not None or (bool(self.member.address) and not self.trouble and not self.is_gone)


class Caller:
    """Makes `RoleGroup`s, and carries their calls. Use it in a `with` statement, or `close` it."""

    def __init__(self, keys: CurveKeys | None = None, heartbeat_seconds: float = HEARTBEAT_SECONDS) -> None:
        self._keys, self._heartbeat_seconds = keys, heartbeat_seconds
        self._name = os.urandom(16)
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        """Guards what several threads use: the members, the roles, the thread and whether it ended."""
        self._members: dict[str, Member] = {}
        self._roles: set[str] = set()
        self._thread: LoopThread | None = None
        self._ended = ""
        # What follows is for the loop alone.
        self._peers: dict[str, Peer] = {}
        self._open: set[Request] = set()
        self._held: defaultdict[str, dict[Request, None]] = defaultdict(dict)
        """Repeatable calls that nobody takes now, by role."""
        self._methods: dict[str, dict[str, bool]] = {}
        """Whether each method of a role is idempotent, as its workers told."""
        self._turns: defaultdict[str, int] = defaultdict(int)

    # --- in any thread ---

    def group(self, role: str) -> RoleGroup:
        """Returns the workers of a role, and begins to connect to them."""
        with self._changed:
            if self._ended:
                raise CallError(f"calls to {role}: {self._ended}")
            if self._thread is None:
                self._thread = LoopThread("calls-out")
            if role not in self._roles:
                self._roles.add(role)
                self._thread.post(self._follow_members)
        return RoleGroup(role, self)

    def update(self, members: Sequence[Member]) -> None:
        """Takes the list of all members of the job. One that names an older incarnation of a worker does not bring it back."""
        with self._changed:
            known = self._members
            self._members = {
                member.worker: max(member, known.get(member.worker, member), key=lambda found: found.incarnation)
                for member in members
            }
            self._changed.notify_all()
            if self._thread is not None and not self._ended:
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
            if not self._changed.wait_for(lambda: self._ended or (self.members(role) and not missing()), timeout):
                names = ", ".join(missing()) or "no worker of the role is known"
                raise CallTimeout(f"{role}: after {timeout:g} s some workers take no calls: {names}")
            if self._ended:
                raise CallError(f"calls to {role}: {self._ended}")

    def send(
        self, role: str, worker: str, fixed: bool, method: str, frames: Sequence[Buffer], timeout: float
    ) -> Call[Any]:
        """Sends a call to `worker`, or if it is not `fixed` or empty to any of the role."""
        request = Request(next(self._numbers), role, worker, fixed, method, frames, timeout)
        with self._changed:
            if self._ended or self._thread is None:
                raise CallError(f"{role}.{method}: {self._ended}")
            self._thread.post(self._begin, request)
        return request.call

    def close(self) -> None:
        """Ends; calls in flight fail with `CallError`."""
        with self._changed:
            if self._ended:
                return
            self._ended = "the calls of this process were closed"
            self._changed.notify_all()
            if self._thread is None:
                return
            self._thread.post(self._end)
        if not self._thread.close(_END_SECONDS):
            logger.warning("the thread of calls did not end within %g s and is abandoned", _END_SECONDS)

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- on the loop: members and connections ---

    def _end(self) -> None:
        for request in [*self._open]:
            self._finish(request, CallError(f"{request}: {self._ended}"))
        for peer in self._peers.values():
            self._disconnect(peer, self._ended)

    def _follow_members(self) -> None:
        members = {member.worker: member for role in self._roles for member in self.members(role)}
        for worker in members.keys() | self._peers.keys():
            member, peer = members.get(worker), self._peers.get(worker)
            if peer is None:
                peer = self._peers[worker] = Peer(members[worker])
            elif member is None or _place(member) != _place(peer.member):
                said = f"its incarnation {member.incarnation} is {member.stage}" if member else "it left the job"
                self._disconnect(peer, said)
            peer.has_left, peer.member = member is None, member or peer.member
            if peer.member.address and not peer.has_left and peer.connecting is None:
                peer.connecting = asyncio.ensure_future(self._keep_connected(peer))
            self._route_all(peer.waiting)
        for role in [*self._held]:
            self._route_all(self._held[role])

    def _disconnect(self, peer: Peer, reason: str) -> None:
        if peer.connecting is not None:
            peer.connecting.cancel()
        connection, peer.connection, peer.connecting, peer.trouble = peer.connection, None, None, ""
        if connection is not None:
            connection.close(reason)

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
                    self._route_all(peer.waiting)
            else:
                failures, peer.trouble, peer.connection = 0, "", connection
                for request in [*peer.waiting]:
                    self._give(request, peer)
                self._route_all(self._held[peer.role])
                connection.ended.add_done_callback(partial(self._note_lost, peer, connection))
                await asyncio.shield(connection.ended)
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
            self._methods[peer.role] = msgspec.msgpack.decode(as_bytes_view(methods), type=METHODS)
        except BaseException:
            connection.close()
            raise
        return connection

    def _note_lost(self, peer: Peer, connection: Connection, ended: asyncio.Future[str]) -> None:
        if peer.connection is connection:  # else it was closed here
            logger.info("lost %s: %s", peer, ended.result())
            peer.connection, peer.trouble = None, ended.result()

    # --- on the loop: calls ---

    def _begin(self, request: Request) -> None:
        self._open.add(request)
        seconds = min(request.deadline - time.monotonic(), 1e6)
        request.timer = asyncio.get_running_loop().call_later(seconds, self._late, request)
        self._give(request, self._choose(request))

    def _late(self, request: Request) -> None:
        where = "no answer" if request.answer is not None else "it was not sent"
        self._finish(request, CallTimeout(f"{request}: {where} within {request.timeout:g} s"))

    def _finish(self, request: Request, result: object) -> None:
        self._open.discard(request)
        request.end(result)

    def _route_all(self, queue: dict[Request, None]) -> None:
        """Decides anew about calls that wait."""
        for request in [*queue]:
            self._give(request, self._choose(request))

    def _give(self, request: Request, peer: Peer | None) -> None:
        """Sends a call to a worker, lets it wait for the connection, or fails it."""
        request.queue.pop(request, None)
        if request.call.done():  # it was cancelled
            self._finish(request, None)
            return
        if peer is None and self._members:
            self._finish(request, NoSuchActor(f"{request}: {self._missing(request)}; the method was not sent"))
        elif peer is not None and peer.connection is not None:
            member = peer.member
            header = CallHeader(self._name, request.number, member.worker, member.incarnation, request.method)
            frames, seconds = [msgspec.msgpack.encode(header), *request.frames], request.deadline - time.monotonic()
            request.answer = peer.connection.ask(frames, seconds)
            request.answer.add_done_callback(partial(self._answered, request, peer, str(peer)))
        elif peer is not None and peer.takes_calls:
            request.wait_in(peer.waiting)
        elif peer is not None and peer.is_gone:
            self._finish(request, ActorDied(f"{request}: {peer} takes no calls any more; the method was not sent"))
        elif self._is_repeatable(request):
            request.wait_in(self._held[request.role])
        else:
            said = "no worker of the job is known yet" if peer is None else f"{peer} takes no calls now: {peer.why_not}"
            self._finish(request, ActorRestarting(f"{request}: {said}; the method was not sent"))

    def _choose(self, request: Request) -> Peer | None:
        """Returns the worker whose turn it is: one that takes calls, else one that may again."""
        named = self._peers.get(request.worker)
        if request.is_fixed or (named is not None and named.takes_calls):
            return named
        peers = [peer for peer in self._peers.values() if peer.role == request.role]
        best = [peer for peer in peers if peer.takes_calls]
        best = best or [peer for peer in peers if not peer.is_gone] or peers
        self._turns[request.role] += 1
        return best[self._turns[request.role] % len(best)] if best else None

    def _missing(self, request: Request) -> str:
        workers = ", ".join(member.worker for member in self.members(request.role))
        if workers:
            return f"the job has no such worker; those of the role are {workers}"
        roles = ", ".join(sorted({_role(member) for member in self._members.values()} - {""}))
        return f"the job has no worker of the role {request.role}; its roles are {roles}"

    def _is_repeatable(self, request: Request) -> bool:
        return self._methods.get(request.role, {}).get(request.method, False)

    def _answered(self, request: Request, peer: Peer, name: str, answer: asyncio.Future[list[Buffer]]) -> None:
        if answer.cancelled():
            return  # the call has ended
        request.answer = None
        failure = answer.exception()
        if not isinstance(failure, RpcError):
            try:
                self._finish(request, decode(answer.result()))
            except CodecError as error:
                said = f"{request}: the result of {name} cannot be read: {error}"
                self._finish(request, RemoteError(said, "CodecError"))
        elif failure.kind == LATE:
            self._late(request)
        elif failure.kind == LOST and not self._is_repeatable(request):
            said = f"{name} died or is silent ({failure}), and nobody knows whether the method ran"
            self._finish(request, ActorDied(f"{request}: {said}"))
        elif failure.kind == LOST:
            self._give(request, self._choose(request))
        elif failure.kind == REFUSED and self._is_repeatable(request):
            request.wait_in(self._held[request.role])
        elif failure.kind == REFUSED:
            said = f"{name} is not there, {failure}; the method was not run"
            self._finish(request, ActorRestarting(f"{request}: {said}"))
        elif failure.kind == BUSY:
            request.busy.add(peer.member.worker)
            peers = [other for other in self._peers.values() if other.role == request.role and other.takes_calls]
            others = [other for other in peers if other.member.worker not in request.busy]
            if others and not request.is_fixed:
                self._give(request, others[0])
            else:
                self._finish(request, ActorBusy(f"{request}: {name} is busy: {failure}; the method was not run"))
        else:
            raised = RemoteError(
                f"{request}: {name} raised {failure}", failure.kind.removeprefix(RAISED), failure.trace
            )
            if failure.trace:
                raised.add_note(f"The traceback in {name}:\n{failure.trace}")
            self._finish(request, raised)


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
