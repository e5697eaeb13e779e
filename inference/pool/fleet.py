"""The servers of a pool, which of them may serve, and which one gets the next request: decisions, without I/O.

A server is `unknown` until it has been reached; `loading` while it takes weights or proves them; `serving`; or `out`, with a
reason. Only a serving one is chosen, and not while it is draining: then it keeps its requests and gets no new ones. No
sockets, tasks or clock here, so that every rule can be tested by calling it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from counterpoint.inference.base import ServerStatus

FAILURES_IN_A_ROW = 3
"""Requests that fail with no success between them before a server is asked for one token, and taken out if that fails, too: fewer
may be a dropped keep-alive connection, and a server that fails fast would, being least loaded, draw all requests to itself."""

REMEMBERED_GROUPS = 16_384
"""Groups whose servers are remembered at most, should their end not be told; the least recently used one is dropped first."""

GROUP_LEAD = 16
"""Requests by which a group's server may be ahead of the least loaded one. The group's next rollout then goes to that one, which
prefills the prompt a second time: that costs less than servers that idle beside one with a large group."""


class State(StrEnum):
    """The state of a server, as the module describes."""

    UNKNOWN = "unknown"
    LOADING = "loading"
    SERVING = "serving"
    OUT = "out"


_SERVING = State.SERVING  # a member is looked up by a function of Python's own, until 3.12


@dataclass(slots=True, eq=False)
class Server:
    """The known state of one server. Only `Fleet` changes it."""

    url: str
    cap: int
    """Requests it may have in flight."""
    state: State = State.UNKNOWN
    reason: str = "not reached yet"
    version: int | None = None
    instance: str | None = None
    """The running process that holds `version`; the weights of another instance are unknown."""
    drain_reason: str = ""
    """Why it gets no new requests, whatever its state; empty if it is not draining."""
    in_flight: int = 0
    failures: int = 0
    """Requests failed since the last success."""
    setbacks: int = 0
    """Times it was taken out since the last success."""
    counted: bool = False
    """Whether it counts towards the capacity: it serves, or did when it began to load."""

    def status(self) -> ServerStatus:
        """Returns a snapshot."""
        draining = bool(self.drain_reason) and self.state in (State.SERVING, State.LOADING)
        state, reason = ("draining", self.drain_reason) if draining else (str(self.state), self.reason)
        return ServerStatus(self.url, state, reason, self.version, self.in_flight, self.cap)


@dataclass(slots=True)
class _Group:
    """Where the rollouts of one group were served last."""

    holder: Server | None = None
    """The server at which the newest rollout began: it holds their prompt."""
    servers: dict[str, Server] = field(default_factory=dict)
    """By affinity."""


class Fleet:
    """The servers and the rules of choosing among them."""

    def __init__(self, urls: Iterable[str], limit: int) -> None:
        self._limit = limit
        self.servers = [Server(url, limit) for url in urls]
        self._groups: OrderedDict[str, _Group] = OrderedDict()

    def add(self, url: str) -> Server:
        """Adds a server, not reached yet."""
        server = Server(url, self._limit)
        self.servers.append(server)
        return server

    def forget(self, server: Server) -> None:
        """Removes a server, which must have no requests."""
        assert not server.in_flight
        self.servers.remove(server)
        for group in self._groups.values():
            group.holder = None if group.holder is server else group.holder
            group.servers = {affinity: held for affinity, held in group.servers.items() if held is not server}

    def forget_group(self, affinity: str) -> None:
        """Forgets where the rollouts of a group were served, once all have ended. `affinity` is that of any of them."""
        self._groups.pop(_group_name(affinity), None)

    @property
    def remembered(self) -> int:
        """How many names it remembers a server for."""
        return sum(len(group.servers) for group in self._groups.values())

    @property
    def capacity(self) -> int:
        """Requests that all servers may have in flight together. A server that only loads new weights still counts."""
        return sum(server.cap for server in self.servers if server.counted and not server.drain_reason)

    @property
    def serving(self) -> list[Server]:
        """The servers that take requests."""
        return [server for server in self.servers if server.state is State.SERVING and not server.drain_reason]

    def acquire(self, affinity: str, avoid: Server | None = None) -> Server | None:
        """Takes a place for a request, or returns None if no server has one.

        `affinity` is the id of a rollout, `GROUP-INDEX`, or any other name. The server that last served this affinity holds its
        prefix, so it is preferred while it has room. The first request of a rollout goes where the one before it of its group
        went, which holds their prompt, unless that server is full or `GROUP_LEAD` ahead. Else the least loaded is taken, the
        first among equals. `avoid` has just failed this request and is taken only if no other has room.
        """
        name = _group_name(affinity)
        group = self._groups.get(name) or _Group()
        own = chosen = group.servers.get(affinity)
        if chosen is None or chosen is avoid or not self._has_room(chosen):
            candidates = [server for server in self.servers if self._has_room(server)]
            if not candidates:
                return None
            chosen = min(candidates, key=lambda server: (server is avoid, server.in_flight))
            holder = group.holder if own is None else None
            if holder in candidates and holder is not avoid and holder.in_flight < chosen.in_flight + GROUP_LEAD:
                chosen = holder
        if own is None:
            group.holder = chosen
        group.servers[affinity] = chosen
        self._remember(name, group)
        chosen.in_flight += 1
        return chosen

    def _remember(self, name: str, group: _Group) -> None:
        self._groups[name] = group
        self._groups.move_to_end(name)
        if len(self._groups) > REMEMBERED_GROUPS:
            self._groups.popitem(last=False)

    def _has_room(self, server: Server) -> bool:
        return server.state is _SERVING and not server.drain_reason and server.in_flight < server.cap

    def release(self, server: Server) -> None:
        """Gives a place back."""
        assert server.in_flight > 0
        server.in_flight -= 1

    def succeeded(self, server: Server) -> None:
        """Notes an answered request."""
        server.failures = server.setbacks = 0

    def failed(self, server: Server) -> bool:
        """Notes a failed request. Returns whether the server is doubted."""
        server.failures += 1
        return self.is_doubted(server)

    def is_doubted(self, server: Server) -> bool:
        """Whether so many requests have failed that a serving one has to show that it can answer."""
        return server.state is State.SERVING and server.failures >= FAILURES_IN_A_ROW

    def begin_loading(self, server: Server) -> None:
        """Stops new requests until it serves again; those in flight stay."""
        server.state, server.reason = State.LOADING, "loading weights"

    def is_late(self, server: Server) -> None:
        """Notes that a server still loads, or proves, what others serve: it gets no request, nor counts, until it serves."""
        if server.state is _SERVING:  # since requests might begin before the proof
            self.begin_loading(server)
        server.counted = False

    def begin_serving(self, server: Server, version: int | None, instance: str) -> None:
        """Notes that the server is healthy and holds `version`."""
        server.state, server.reason = State.SERVING, ""
        server.version, server.instance = version, instance
        server.failures, server.counted = 0, True

    def drain(self, server: Server, reason: str) -> None:
        """Stops new requests while there is a reason; those in flight stay."""
        server.drain_reason = reason

    def set_cap(self, server: Server, cap: int) -> None:
        """Sets the most requests in flight; those above it stay."""
        server.cap = cap

    def take_out(self, server: Server, reason: str) -> None:
        """Stops requests; the server's weights are unknown from now on."""
        if server.state is not State.OUT:
            server.setbacks += 1
        server.state, server.reason = State.OUT, reason
        server.version = server.instance = None
        server.failures, server.counted = 0, False

    def intervals_out(self, server: Server) -> int:
        """Returns for how many health intervals a server that was taken out gets no weights.

        None at first, then 1, 3, 7 and so on, up to 31.
        """
        return int(2 ** min(max(server.setbacks - 1, 0), 5)) - 1


def _group_name(affinity: str) -> str:
    """Returns the name of a rollout's group, with its dash; another name is a group by itself."""
    group, dash, index = affinity.rpartition("-")
    return group + dash if dash else index
