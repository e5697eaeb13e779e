"""The caller's end of all calls of a process: one thread that owns the connections, and decides what becomes of each call.

`group.py` is what users see of it. The worker's process makes one `Caller`, gives it each list of members that it is told, and
closes it. `server.py` is the other end.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import zmq

from counterpoint.cluster.calls import messages
from counterpoint.cluster.calls.call import Call
from counterpoint.cluster.calls.codec import CodecError
from counterpoint.cluster.calls.connection import Connected, Connection, Event, Lost
from counterpoint.cluster.calls.group import RoleGroup
from counterpoint.cluster.calls.peer import Condition, Peer, next_in_turn
from counterpoint.cluster.calls.request import OpenRequests, Request
from counterpoint.cluster.calls.server import MAX_FRAME_BYTES
from counterpoint.cluster.calls.waker import Waker
from counterpoint.cluster.errors import ActorDied, ActorRestarting, CallError, CallTimeout, NoSuchActor
from counterpoint.cluster.member import Member, Stage
from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.rate_limited_log import RateLimitedLog
from counterpoint.transport.wires.endpoint import CurveKeys

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 2.0
"""Seconds between two heartbeats of a connection. Within two of them, silence ends a call."""

_LONGEST_WAIT_SECONDS = 1.0
_END_SECONDS = 5.0


class Caller:
    """Makes `RoleGroup`s, and carries their calls. Use it in a `with` statement, or `close` it."""

    def __init__(
        self,
        keys: CurveKeys | None = None,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._keys, self._heartbeat_seconds, self._max_frame_bytes = keys, heartbeat_seconds, max_frame_bytes
        self._name = os.urandom(16)
        self._log = RateLimitedLog(logger)
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        """Guards what several threads use: the members, the roles, the thread and whether it ended."""
        self._members: dict[str, Member] = {}
        self._roles: set[str] = set()
        self._thread: threading.Thread | None = None
        self._ended = ""
        # What follows is for the thread alone.
        self._stopping = False
        self._peers: dict[str, Peer] = {}
        self._open = OpenRequests()
        self._held: defaultdict[str, list[Request]] = defaultdict(list)
        """Repeatable calls that nobody takes now, by role."""
        self._methods: defaultdict[str, dict[str, bool]] = defaultdict(dict)
        """Whether each method of a role is idempotent, as its workers told."""
        self._turns: defaultdict[str, int] = defaultdict(int)

    # --- in any thread ---

    def group(self, role: str) -> RoleGroup:
        """Returns the workers of a role, and begins to connect to them."""
        with self._changed:
            if self._ended:
                raise CallError(f"calls to {role}: {self._ended}")
            new = role not in self._roles
            self._roles.add(role)
            if self._thread is None:
                self._waker = Waker()
                self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
                self._poller = zmq.Poller()
                self._thread = threading.Thread(target=self._serve, name="calls-out", daemon=True)
                self._thread.start()
            if new:
                self._waker.post(self._follow_members)
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
                self._waker.post(self._follow_members)

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
        call: Call[Any] = Call()
        request = Request(
            call, next(self._numbers), role, worker, fixed, method, frames, time.monotonic() + timeout, timeout
        )
        with self._changed:
            if self._ended:
                raise CallError(f"{role}.{method}: {self._ended}")
            self._waker.post(lambda: self._begin(request))
        return call

    def close(self) -> None:
        """Ends; calls in flight fail with `CallError`."""
        with self._changed:
            if self._ended:
                return
            self._ended = "the calls of this process were closed"
            self._changed.notify_all()
            if self._thread is None:
                return
            self._waker.post(self._stop)
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():
            logger.warning("the thread of calls did not end within %g s and is abandoned", _END_SECONDS)

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- in the thread ---

    def _serve(self) -> None:
        try:
            self._poller.register(self._waker.descriptor, zmq.POLLIN)
            while not self._stopping:
                ready = {socket for socket, _ in self._poller.poll(math.ceil(1000 * self._seconds_to_wait()))}
                for work in self._waker.take():
                    work()
                if len(ready) > 1 or self._waker.descriptor not in ready:
                    for peer in [*self._peers.values()]:
                        if peer.is_ready(ready):
                            self._read(peer)
                self._act_on_time()
        except Exception as error:
            logger.exception("calls to other workers: the thread failed")
            with self._changed:
                self._ended = f"the thread of calls failed: {error!r}"
                self._changed.notify_all()
        finally:
            self._end()

    def _stop(self) -> None:
        # Not `_ended`, which is set before the thread is woken: it would close what wakes it too soon.
        self._stopping = True

    def _end(self) -> None:
        for peer in self._peers.values():
            self._disconnect(peer)
        self._context.term()
        for work in self._waker.take():
            work()  # so that calls that were just posted fail, too
        for request in self._open:
            self._fail(request, CallError(f"{request}: {self._ended}"))
        self._waker.close()

    def _seconds_to_wait(self) -> float:
        now = time.monotonic()
        due = [self._open.due, *(peer.due for peer in self._peers.values())]
        return max(0.0, min([_LONGEST_WAIT_SECONDS, *(when - now for when in due)]))

    def _act_on_time(self) -> None:
        now = time.monotonic()
        for request in self._open.take_late(now):
            was_sent = request.peer is not None and request.number in request.peer.in_flight
            where = "no answer" if was_sent else "it was not sent"
            self._fail(request, CallTimeout(f"{request}: {where} within {request.timeout:g} s"))
        for peer in self._peers.values():
            if peer.due <= now:
                if peer.is_to_connect:
                    self._connect(peer)
                elif peer.connection is None:
                    peer.due = math.inf
                else:
                    peer.give_up_connecting()
                    self._send_again(peer)

    # members and connections

    def _follow_members(self) -> None:
        members = {member.worker: member for role in self._roles for member in self.members(role)}
        for worker, peer in self._peers.items():
            member = members.get(worker)
            if peer.has_left and member is None:
                continue
            if member is None or (member.incarnation, member.address) != (peer.member.incarnation, peer.member.address):
                said = f"its incarnation {member.incarnation} is {member.stage}" if member else "it left the job"
                self._lose(peer, said)
            peer.follow(member)
            self._send_again(peer)
            if peer.is_to_connect and peer.due == math.inf:
                self._connect(peer)
        for worker, member in members.items():
            if worker not in self._peers:
                peer = self._peers[worker] = Peer(_role(member), member)
                if peer.is_to_connect:
                    self._connect(peer)
        for role in [*self._held]:
            self._take_held(role)

    def _connect(self, peer: Peer) -> None:
        try:
            connection = Connection(
                self._context, peer.member, self._keys, self._heartbeat_seconds, self._max_frame_bytes
            )
        except zmq.ZMQError as error:
            self._lose(peer, f"{peer.member.address!r} with key {peer.member.server_key!r}: {error}")
            return
        peer.begin(connection, 2 * self._heartbeat_seconds)
        for socket in (connection.socket, connection.monitor):
            self._poller.register(socket, zmq.POLLIN)

    def _disconnect(self, peer: Peer) -> None:
        if peer.connection is not None:
            for socket in (peer.connection.socket, peer.connection.monitor):
                self._poller.unregister(socket)
            peer.connection.close()
            peer.connection = None

    def _lose(self, peer: Peer, reason: str) -> None:
        """Ends the connection, and fails or sends again what was in flight."""
        self._disconnect(peer)
        requests = peer.lose(reason)
        for request in requests:
            if request.call.done():
                self._open.drop(request)
            elif self._is_repeatable(request):
                self._route(request)
            else:
                said = f"{peer} died or is silent ({reason}), and nobody knows whether the method ran"
                self._fail(request, ActorDied(f"{request}: {said}"))

    def _send_again(self, peer: Peer) -> None:
        """Decides anew about what was not sent."""
        for request in peer.take_waiting():
            self._route(request)

    def _read(self, peer: Peer) -> None:
        connection = peer.connection
        assert connection is not None
        for event in connection.read():
            self._take_event(peer, event)

    def _take_event(self, peer: Peer, event: Event) -> None:
        if isinstance(event, Lost):
            logger.info("lost %s: %s", peer, event)
            self._lose(peer, event)
            self._send_again(peer)
        elif isinstance(event, Connected):
            peer.connected()
            self._send_frames(peer, [messages.HELLO])
            for request in peer.take_waiting():
                self._give(request, peer)
            self._take_held(peer.role)
        else:
            try:
                self._receive(peer, event)
            except CodecError as error:
                self._log.note(logging.WARNING, f"dropped a message of {peer}: {error}")

    def _take_held(self, role: str) -> None:
        for request in self._held.pop(role, []):
            self._route(request)

    # calls

    def _begin(self, request: Request) -> None:
        self._open.add(request)
        self._route(request)

    def _route(self, request: Request) -> None:
        """Gives a call to the worker whose turn it is."""
        self._give(request, self._choose(request))

    def _give(self, request: Request, peer: Peer | None) -> None:
        """Sends a call to a worker, lets it wait for the connection, or fails it."""
        if request.call.done():  # it was cancelled, or its deadline has passed
            self._open.drop(request)
            return
        request.peer = peer
        if peer is None and self._members:
            self._fail(request, NoSuchActor(f"{request}: {self._missing(request)}; the method was not sent"))
            return
        condition = Condition.RESTARTING if peer is None else peer.condition
        if peer is not None and condition == Condition.CONNECTED:
            self._send_frames(peer, request.message(self._name, peer.member))
            peer.in_flight[request.number] = request
        elif peer is not None and condition == Condition.CONNECTING:
            peer.waiting.append(request)
        elif condition == Condition.GONE:
            self._fail(request, ActorDied(f"{request}: {peer} takes no calls any more; the method was not sent"))
        elif self._is_repeatable(request):
            self._held[request.role].append(request)
        else:
            said = "no worker of the job is known yet" if peer is None else f"{peer} takes no calls now: {peer.trouble}"
            self._fail(request, ActorRestarting(f"{request}: {said}; the method was not sent"))

    def _choose(self, request: Request) -> Peer | None:
        named = self._peers.get(request.worker)
        if request.is_fixed or (named is not None and named.takes_calls):
            return named
        self._turns[request.role] += 1
        return next_in_turn(
            [peer for peer in self._peers.values() if peer.role == request.role], self._turns[request.role]
        )

    def _missing(self, request: Request) -> str:
        workers = ", ".join(member.worker for member in self.members(request.role))
        if workers:
            return f"the job has no such worker; those of the role are {workers}"
        roles = ", ".join(sorted({_role(member) for member in self._members.values()} - {""}))
        return f"the job has no worker of the role {request.role}; its roles are {roles}"

    def _other(self, request: Request) -> Peer | None:
        """Returns a worker of the role where nothing hangs, for a call that need not go to one worker."""
        peers = [peer for peer in self._peers.values() if peer.role == request.role and peer.takes_calls]
        others = [peer for peer in peers if peer.member.worker not in request.busy]
        return others[0] if others and not request.is_fixed else None

    def _is_repeatable(self, request: Request) -> bool:
        return self._methods[request.role].get(request.method, False)

    def _send_frames(self, peer: Peer, frames: Sequence[Buffer]) -> None:
        assert peer.connection is not None
        peer.connection.send(frames)

    def _receive(self, peer: Peer, frames: Sequence[Buffer]) -> None:
        kind = bytes(as_bytes_view(frames[0])[:16])
        if kind == messages.METHODS:
            self._methods[peer.role] = messages.read_methods(frames)[2]
            return
        number, others = messages.read_number(frames)
        request = peer.in_flight.pop(number, None)
        if request is None:
            return  # its deadline has passed
        if kind == messages.BUSY:
            request.busy.add(peer.member.worker)
        if kind == messages.REFUSED and self._is_repeatable(request):
            self._held[request.role].append(request)
        elif kind == messages.BUSY and (other := self._other(request)) is not None:
            self._give(request, other)
        else:
            self._open.drop(request)
            request.end(str(peer), kind, others, frames[2:])

    def _fail(self, request: Request, error: CallError) -> None:
        self._open.drop(request)
        if request.peer is not None:
            request.peer.forget(request)
        held = self._held.get(request.role)
        if held is not None and request in held:
            held.remove(request)
        request.fail(error)


def _role(member: Member) -> str:
    """Returns the role of a worker; its own name for a SubMaster."""
    role, _, rank = member.worker.rpartition("-")
    return role if rank.isdecimal() else member.worker


def _rank(member: Member) -> int:
    """Returns the rank of a worker; -1 for a SubMaster."""
    rank = member.worker.rpartition("-")[2]
    return int(rank) if rank.isdecimal() else -1
