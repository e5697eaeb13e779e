"""The servers of a pool: their addresses, monitors and connections, and the requests that wait for them.

Any number of names of weights share the servers, their health checks and their caps. `fleet` decides which server gets a
request, `sources` lists the servers. For one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path

from counterpoint.inference.base import InferenceError, WeightUpdate
from counterpoint.inference.clients.binary_http import ANSWERS_PER_TICK
from counterpoint.inference.clients.client import BinaryClient, ServerClient
from counterpoint.inference.clients.http_sessions import HttpSessions
from counterpoint.inference.clients.openai_client import OpenAIClient
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.per_tick_limiter import PerTickLimiter
from counterpoint.inference.pool import model_names
from counterpoint.inference.pool.deadlines import BlockDeadlines
from counterpoint.inference.pool.fleet import Fleet, FleetMember, Name
from counterpoint.inference.pool.holder import Holder, Vetting
from counterpoint.inference.pool.server_monitor import ServerMonitor
from counterpoint.inference.pool.sources import Listing, Sources
from counterpoint.transport.outages import Outages

logger = logging.getLogger(__name__)

STARTS_PER_TICK = 8
"""Requests sent in one tick of the loop: a step begins with hundreds at once, which would delay everything else. It is twice
`binary_http.ANSWERS_PER_TICK`: a task that gets an answer then sends the next request at once, whatever comes first in the
tick."""

CHECKS_PER_TICK = 4
"""Health checks, loads and proofs that begin in one tick, of all servers: hundreds of servers are due in the same one after an
update, and their answers come together, too. Each takes a sixth of a millisecond, with 64 names of weights, too."""


class Waiter:
    """A request that waits for a server."""

    def __init__(self, affinity: str, avoid: FleetMember | None, number: int) -> None:
        """`number` orders the requests of all names by their arrival."""
        self.affinity, self.avoid, self.number = affinity, avoid, number
        self.place: asyncio.Future[FleetMember] = asyncio.get_running_loop().create_future()


class Places:
    """One name's places at all servers, and its requests that wait for one. `on_capacity` gets each new capacity."""

    def __init__(self, fleet: Fleet, name: Name, on_capacity: Callable[[int], None] | None) -> None:
        self.name = name
        self.holders: dict[FleetMember, Holder] = {}
        """The holder of each server, in the order of the servers' addition."""
        self.wanted: WeightUpdate | None = None
        """The weights to serve, or None for those that the servers have."""
        self.vetting: Vetting | None = None
        """Vets each server before it serves the name."""
        self.waiting: deque[Waiter] = deque()
        self.on_capacity = on_capacity
        self.changed = asyncio.Event()
        """Set when the state of a server has changed for the name."""
        self._fleet = fleet
        self._capacity = 0

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns when a condition on the servers' state for this name holds."""
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    def serve_first(self) -> bool:
        """Gives the longest waiting request a place. Returns whether it needs none any more."""
        waiter = self.waiting[0]
        if not waiter.place.done():
            server = self._fleet.acquire(self.name, waiter.affinity, waiter.avoid)
            if server is None:
                return False
            waiter.place.set_result(server)
        self.waiting.popleft()
        return True

    def tell_capacity(self) -> None:
        """Reports the capacity if somebody wants to know it and it has changed."""
        if self.on_capacity is not None and (capacity := self._fleet.capacity(self.name)) != self._capacity:
            self._capacity = capacity
            self.on_capacity(capacity)


class PoolServers:
    """The servers of `config`.

    `operator_file` is as of `Sources`. `outages` gets those of its servers.
    """

    def __init__(
        self, config: PoolConfig, *, operator_file: Path | None = None, outages: Outages | None = None
    ) -> None:
        """Opens nothing yet: its first name does that."""
        self.config = config
        self.fleet = Fleet(config.max_concurrent_requests_per_server)
        self.starts = PerTickLimiter(STARTS_PER_TICK, paced=False)
        self.checks = PerTickLimiter(CHECKS_PER_TICK)
        self.releases = PerTickLimiter(ANSWERS_PER_TICK)
        """Answers that have waited for a proof: those of a server come together."""
        self.deadlines = BlockDeadlines()
        """The deadlines of the requests at servers."""
        self._outages = Outages() if outages is None else outages
        self._sources = Sources(config, operator_file)
        self._connections = HttpSessions(config)
        self._monitors: dict[FleetMember, ServerMonitor] = {}
        self._tasks: dict[FleetMember, asyncio.Task[None]] = {}
        """The task of each server's monitor."""
        self._sources_task: asyncio.Task[None] | None = None
        self._names: list[Places] = []
        self._users = 0
        """Names that have not ended."""
        self._opening = asyncio.Lock()
        self._opened = self._closed = False
        self._numbers = count()
        self._queued: set[Places] = set()
        """The names with requests that wait, and some whose requests wait no more."""

    def add_name(self, places: Places) -> None:
        """Adds a name at all servers."""
        self._names.append(places)
        self._users += 1
        for server, monitor in self._monitors.items():
            self._hold(places, server, monitor)

    def _hold(self, places: Places, server: FleetMember, monitor: ServerMonitor) -> None:
        holder = places.holders[server] = monitor.hold(places.name, partial(self._name_changed, places))
        if places.vetting is not None:
            holder.vet_by(places.vetting)
        if places.wanted is not None:
            holder.carry_out(holder.held.want(places.wanted))

    async def open(self) -> None:
        """Opens connections and begins to monitor the servers, unless that has happened already."""
        async with self._opening:
            if self._closed:
                raise InferenceError("the inference pool is closed")
            if self._opened:
                return
            await self._connections.__aenter__()
            self._opened = True
            await self._apply_listing(await self._sources.read())
            if self._sources.changes:
                self._sources_task = asyncio.create_task(
                    self._follow_sources(), name="follower of the servers' sources"
                )
                self._sources_task.add_done_callback(self._sources_task_ended)

    async def drop(self, places: Places) -> None:
        """Ends a name and gives its weights up. Closes everything with the last one."""
        self._names.remove(places)
        for monitor in self._monitors.values():
            monitor.holders.pop(places.name, None)
        try:
            if self._opened:
                last = self._users == 1
                await asyncio.gather(*(holder.give_up(last=last) for holder in list(places.holders.values())))
        finally:
            self.fleet.drop(places.name)
            places.changed.set()
            self._users -= 1
            if not self._users and not self._closed:
                await self._close()

    async def _close(self) -> None:
        self._closed = True
        tasks = [*self._tasks.values(), *([self._sources_task] if self._sources_task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._opened:
            await self._connections.__aexit__(None, None, None)

    async def check_model(self, model: str, servers: Sequence[FleetMember]) -> None:
        """Raises `ModelNotServed` if none of the servers has `model`. See `model_names.check`."""
        await model_names.check(model, [server.url for server in servers], self._connections)

    def describe_sources(self) -> str:
        """Says for a person where the servers come from."""
        return self._sources.describe()

    async def _follow_sources(self) -> None:
        while True:
            await asyncio.sleep(self.config.health_interval_seconds)
            await self._apply_listing(await self._sources.read())

    async def _apply_listing(self, listing: Listing) -> None:
        """Adds new servers, and drains those that are no longer listed or listed as drained.

        Removes a server that is no longer listed once it has no request of this pool. (No request outlasts
        `request_timeout_seconds`.)
        """
        known = {server.url: server for server in self.fleet.servers}
        for url, drain_reason in listing.items():
            server = known.pop(url, None) or self._add(url)
            self._monitors[server].drain(drain_reason)
        for server in known.values():
            self._monitors[server].drain("it is no longer among the servers")
            if not server.in_flight:
                await self._forget(server)

    def _add(self, url: str) -> FleetMember:
        server = self.fleet.add(url)
        client: ServerClient
        if self.config.protocol == "binary":
            client = BinaryClient(url, self._connections, proves=self._sources.is_configured(url))
        else:
            client = OpenAIClient(url, self._connections)
        monitor = ServerMonitor(
            server, client, self.fleet, self.config, self._server_changed, self._outages, self.checks
        )
        self._monitors[server] = monitor
        for places in self._names:
            self._hold(places, server, monitor)
        task = self._tasks[server] = asyncio.create_task(monitor.run(), name=f"monitor of {url}")
        task.add_done_callback(partial(self._monitor_ended, monitor))
        return server

    async def _forget(self, server: FleetMember) -> None:
        self.fleet.forget(server)
        monitor, task = self._monitors.pop(server), self._tasks.pop(server)
        for places in self._names:
            places.holders.pop(server, None)
        task.cancel()
        await asyncio.wait([task])
        monitor.forget()
        self._server_changed()
        logger.info("Inference server %s is removed", server.url)

    # --- waiting ---

    def queue(self, places: Places, affinity: str, avoid: FleetMember | None) -> Waiter:
        """Has a request wait for a place, behind those that wait already."""
        places.waiting.append(waiter := Waiter(affinity, avoid, next(self._numbers)))
        self._queued.add(places)
        self.serve_waiting()
        return waiter

    def serve_waiting(self) -> None:
        """Gives places to the longest waiting requests of all names. One without a server holds up no other."""
        if not self._queued:  # as after nearly every request
            return
        self._queued = {places for places in self._queued if places.waiting}
        heads = list(self._queued)
        while heads and self.fleet.has_room:
            first = min(heads, key=lambda places: places.waiting[0].number)
            if not first.serve_first() or not first.waiting:
                heads.remove(first)

    def _name_changed(self, places: Places, counts_otherwise: bool) -> None:
        places.changed.set()
        if places.waiting:
            self.serve_waiting()
        if counts_otherwise:  # each update changes all servers several times, and the capacity is a sum over all
            places.tell_capacity()

    def _server_changed(self) -> None:
        self.serve_waiting()
        for places in self._names:
            places.changed.set()
            places.tell_capacity()

    def _monitor_ended(self, monitor: ServerMonitor, task: asyncio.Task[None]) -> None:
        for places in self._names:
            places.changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("The monitor of %s failed; this is a defect", monitor.server.url, exc_info=error)
            for holder in monitor.holders.values():
                holder.lose(f"its monitor failed: {error!r}")

    def _sources_task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("The servers' sources are followed no more; this is a defect", exc_info=error)
