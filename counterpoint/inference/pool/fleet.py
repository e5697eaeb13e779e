"""The servers of a pool, and the choice of the one that gets the next request of a name: decisions, without I/O.

All names share a server's cap. A name gets a server that takes its requests (`held`) and is not draining. A draining server
keeps its requests and gets no new ones. No sockets, tasks or clock here, so that a test can call every rule.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from operator import attrgetter

from counterpoint.inference.base import ServerStatus
from counterpoint.inference.loads import LoadClaim
from counterpoint.inference.pool.held import Held

REMEMBERED_GROUPS = 16_384
"""Groups with remembered servers at most, if nobody reports their end. The least recently used one is dropped first."""

GROUP_LEAD = 16
"""Requests by which a group's server may be ahead of the least loaded one. The group's next rollout then goes to that one,
which prefills the prompt a second time: that costs less than idle servers beside one with a large group."""


_IN_FLIGHT = attrgetter("in_flight")


@dataclass(frozen=True, slots=True, eq=False)
class Name:
    """One name of weights that a pool serves. Two names of one model are separate."""

    model: str
    """The name in requests: the base model's name at the servers, or an adapter's."""
    claim: LoadClaim
    """The owner of the weights under it."""
    follows: bool = False
    """Whether another run loads its weights, so that they may change at any time."""
    limit: int | None = None
    """The most of its requests at a server, or None for as many as the server's cap allows."""
    called: str = "inference server"
    """The title of its servers in the list of outages, before their URL."""


@dataclass(slots=True, eq=False)
class FleetMember:
    """The known state of one server. Only `Fleet` changes it."""

    url: str
    cap: int
    """Requests it may have in flight, of all names together."""
    drain_reason: str = ""
    """Why it gets no new requests, whatever it holds, or empty if it is not draining."""
    in_flight: int = 0
    well_at: float | None = None
    """The time of its last answer, in Unix seconds."""
    names: dict[Name, Held] = field(default_factory=dict)

    def status(self, held: Held) -> ServerStatus:
        """Returns a snapshot of the server as one name of it sees it."""
        state, reason = held.status
        if self.drain_reason and state in ("serving", "loading"):
            state, reason = "draining", self.drain_reason
        return ServerStatus(self.url, state, reason, held.version, self.in_flight, self.cap)

    @property
    def has_room(self) -> bool:
        """Whether it may get another request of any name."""
        return self.in_flight < self.cap and not self.drain_reason

    def has_room_for(self, name: Name) -> bool:
        """Whether it may get another request of this name."""
        if self.in_flight >= self.cap or self.drain_reason:
            return False
        held = self.names.get(name)
        return held is not None and held.takes_requests and (name.limit is None or held.in_flight < name.limit)


@dataclass(slots=True)
class _Group:
    """The server of one group's newest rollouts."""

    holder: FleetMember | None = None
    """The server of the newest rollout's first request, which holds their prompt."""
    servers: dict[str, FleetMember] = field(default_factory=dict)
    """The server of each affinity."""


class Fleet:
    """The servers, and the rules of choosing among them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.servers: list[FleetMember] = []
        self._groups: OrderedDict[tuple[Name, str], _Group] = OrderedDict()
        """The groups, by their names with the dash, such as `17-` for the rollouts `17-0` and `17-1`."""

    def add(self, url: str) -> FleetMember:
        """Adds a server, not reached yet."""
        server = FleetMember(url, self._limit)
        self.servers.append(server)
        return server

    def forget(self, server: FleetMember) -> None:
        """Removes a server, which must have no requests."""
        assert not server.in_flight
        self.servers.remove(server)
        for group in self._groups.values():
            group.holder = None if group.holder is server else group.holder
            group.servers = {affinity: held for affinity, held in group.servers.items() if held is not server}

    def drop(self, name: Name) -> None:
        """Removes a name."""
        for server in self.servers:
            server.names.pop(name, None)
        for key in [key for key in self._groups if key[0] is name]:
            del self._groups[key]

    def forget_group(self, name: Name, affinity: str) -> None:
        """Forgets the servers of a group's rollouts, once all have ended. `affinity` is that of any of them."""
        self._groups.pop((name, _group_name(affinity)), None)

    @property
    def remembered(self) -> int:
        """The number of affinities with a remembered server."""
        return sum(len(group.servers) for group in self._groups.values())

    def capacity(self, name: Name) -> int:
        """Requests that all servers of a name may have in flight together. A server that only loads new weights still counts."""
        return sum(
            server.cap if name.limit is None else min(server.cap, name.limit)
            for server in self.servers
            if (held := server.names.get(name)) is not None and held.counts and not server.drain_reason
        )

    def serving(self, name: Name) -> list[FleetMember]:
        """The servers that take requests of a name."""
        return [
            server
            for server in self.servers
            if (held := server.names.get(name)) is not None and held.takes_requests and not server.drain_reason
        ]

    @property
    def has_room(self) -> bool:
        """Whether any server may get another request of some name."""
        return any(server.has_room for server in self.servers)

    def acquire(self, name: Name, affinity: str, avoid: FleetMember | None = None) -> FleetMember | None:
        """Takes a place for a request, or returns None if no server has one.

        `affinity` is the id of a rollout, `GROUP-INDEX`, or any other name. The server that last served this affinity holds its
        prefix, so it is preferred while it has room. The first request of a rollout goes to the server of its group's last one,
        which holds their prompt, unless that server is full or `GROUP_LEAD` ahead. Else the least loaded is taken, the first
        among equals. `avoid` has just failed this request and is taken only if no other has room.
        """
        key = (name, _group_name(affinity))
        group = self._groups.get(key) or _Group()
        own = chosen = group.servers.get(affinity)
        if chosen is None or chosen is avoid or not chosen.has_room_for(name):
            chosen = self._least_loaded(name, avoid)
            if chosen is None:
                return None
            holder = group.holder if own is None else None
            if holder is not None and holder is not avoid and holder.has_room_for(name):
                chosen = holder if holder.in_flight < chosen.in_flight + GROUP_LEAD else chosen
        if own is None:
            group.holder = chosen
        group.servers[affinity] = chosen
        self._remember(key, group)
        chosen.in_flight += 1
        chosen.names[name].in_flight += 1
        return chosen

    def _least_loaded(self, name: Name, avoid: FleetMember | None) -> FleetMember | None:
        """Returns the least loaded server with room for a name, the first among equals; `avoid` if no other has room."""
        # To sort hundreds by a number takes a quarter of the time of looking whether each has room, and the first mostly has.
        for server in sorted(self.servers, key=_IN_FLIGHT):
            if server is not avoid and server.has_room_for(name):
                return server
        return avoid if avoid is not None and avoid.has_room_for(name) else None

    def _remember(self, key: tuple[Name, str], group: _Group) -> None:
        self._groups[key] = group
        self._groups.move_to_end(key)
        if len(self._groups) > REMEMBERED_GROUPS:
            self._groups.popitem(last=False)

    def release(self, name: Name, server: FleetMember) -> None:
        """Gives a place back."""
        assert server.in_flight > 0
        server.in_flight -= 1
        if (held := server.names.get(name)) is not None:
            held.in_flight -= 1

    def drain(self, server: FleetMember, reason: str) -> None:
        """Stops new requests while there is a reason. Requests in flight stay."""
        server.drain_reason = reason

    def set_cap(self, server: FleetMember, cap: int) -> None:
        """Sets the most requests in flight. Requests above it stay."""
        server.cap = cap


def _group_name(affinity: str) -> str:
    """Returns the name of a rollout's group, with its dash. Another name is a group by itself."""
    group, dash, index = affinity.rpartition("-")
    return group + dash if dash else index
