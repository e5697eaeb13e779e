"""The monitor of one server: checks its health and load, for all names of weights that the pool has there.

Every server of a pool has a monitor, a task that runs as long as the server is in use. A name's machine (`held`) gets the
results of the checks, and decides what its weights need.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from counterpoint.inference.base import InferenceError, ServerUnreachable
from counterpoint.inference.clients.capacity import CapacityController, Observation
from counterpoint.inference.clients.client import ServerClient, ServerIdentity
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.per_tick_limiter import PerTickLimiter
from counterpoint.inference.pool import liveness
from counterpoint.inference.pool.fleet import Fleet, FleetMember, Name
from counterpoint.inference.pool.holder import Holder
from counterpoint.transport.outages import Outages

logger = logging.getLogger(__name__)

HEALTH_DEADLINE_SECONDS = 10.0
"""Deadline of one health check. Long, since a server may wait for CPU time on a busy machine."""

LOAD_DEADLINE_SECONDS = 2.0
"""Deadline of one observation of the load, which new weights may have to wait for."""

STARTING_SECONDS = 0.1
"""Longest time between two checks of a server that has not served yet: a job starts, and waits for it."""

SLOW_CHECKS_IN_A_ROW = 3
"""Health checks in a row without an answer in time before the server goes out. One that refuses a connection is out at once."""


class ServerMonitor:
    """The monitor of one server."""

    def __init__(
        self,
        server: FleetMember,
        client: ServerClient,
        fleet: Fleet,
        config: PoolConfig,
        on_change: Callable[[], None],
        outages: Outages,
        turns: PerTickLimiter,
    ) -> None:
        """`outages` gets the server's, one for each name. `turns` are those of all servers to ask one of them something."""
        self.server = server
        self.client = client
        self.holders: dict[Name, Holder] = {}
        self._fleet = fleet
        self._config = config
        self._on_change = on_change
        self._outages = outages
        self._turns = turns
        self._wake = asyncio.Event()
        self._controller: CapacityController | None = None
        """None until the server has reported its load."""
        self._load_observed = config.capacity == "fixed"
        self._drain_reason = ""
        """Why the pool drains it, or empty."""
        self._told_to_drain = ""
        """The same for the server itself."""
        self._slow_checks = 0
        self._silence = liveness.Silence()
        self._since_look = 0.0
        """Seconds of regular intervals since the last look at the load."""

    def hold(self, name: Name, on_change: Callable[[bool], None]) -> Holder:
        """Adds a name with unknown weights until the next health check. `on_change` is as of `Holder`."""
        regular = self._config.health_interval_seconds
        holder = self.holders[name] = Holder(
            self.server,
            name,
            self.client,
            self._config,
            check=self.check_now,
            observe=self._observe,
            on_change=on_change,
            outages=self._outages,
            turns=self._turns,
            longest_pause=2 * regular + HEALTH_DEADLINE_SECONDS + LOAD_DEADLINE_SECONDS,
        )
        self.check_now()
        return holder

    def drain(self, reason: str) -> None:
        """Stops new requests while there is a reason."""
        self._drain_reason = reason
        self._update_draining()

    def check_now(self) -> None:
        """Checks the server's health without waiting for the next interval."""
        self._wake.set()

    def forget(self) -> None:
        """Ends all tasks of a server that is no longer in use."""
        for holder in self.holders.values():
            holder.forget()
        self.client.close()

    async def run(self) -> None:
        """Monitors the server until cancelled."""
        while True:
            self._wake.clear()
            await self._check()
            pause, began = self._pause, time.monotonic()
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
                # Looks come at regular intervals: two right after a failure would include the same burst twice.
                self._since_look = 0.0
            except TimeoutError:
                self._since_look += pause
                if self._since_look >= self._config.health_interval_seconds:
                    await self._look()
            self._silence.goes_on(min(time.monotonic() - began, pause))

    @property
    def _has_served(self) -> bool:
        return any(holder.held.has_served for holder in self.holders.values())

    @property
    def _is_loading(self) -> bool:
        return any(holder.held.is_proving for holder in self.holders.values())

    @property
    def _pause(self) -> float:
        regular = self._config.health_interval_seconds
        if self._is_loading:
            return min(regular, liveness.LONGEST_PAUSE_SECONDS, liveness.SILENT_SECONDS / 4)
        return regular if self._has_served else min(regular, STARTING_SECONDS)

    async def _check(self) -> None:
        await self._turns.turn()
        turns = self._turns_of_names()
        deadline = self._silence.patience if self._is_loading else HEALTH_DEADLINE_SECONDS
        began = time.monotonic()
        try:
            async with asyncio.timeout(deadline):
                identity = await self.client.identify()
        except TimeoutError:
            self._slow_checks += 1
            reason = f"no answer to a health check within {deadline:g} s, {self._slow_checks} times"
            self._unanswered(reason, "", began, reached=False, firm=self._slow_checks >= SLOW_CHECKS_IN_A_ROW)
        except InferenceError as error:
            # Each attempt at a host that is gone may take seconds.
            self._unanswered(str(error), str(error), began, reached=not isinstance(error, ServerUnreachable))
        else:
            self._slow_checks = 0
            self._silence.ends()
            self.server.well_at = time.time()
            self._told_to_drain = "it was told to drain" if identity.draining else ""
            self._update_draining()
            if not self._load_observed:
                await self._update_cap()
            self._checked(identity, turns)

    def _checked(self, identity: ServerIdentity, turns: Mapping[Name, int]) -> None:
        """Tells each name that a health check which began at `turns` was answered."""
        now, instance, weights, adapters = time.monotonic(), identity.instance, identity.weights, identity.adapters
        for name, holder in list(self.holders.items()):
            held, turn = holder.held, turns.get(name, -1)
            seen = turn, instance, weights, adapters.get(name.model)
            if holder.at_rest == seen and turn == held.turn:
                continue
            holder.carry_out(held.checked(identity, turn, now))
            # With another turn now, the check began before what the name did meanwhile, and was not compared with it.
            if turn == held.turn and held.settled and held.serves_wanted:
                holder.at_rest = seen

    def _turns_of_names(self) -> dict[Name, int]:
        return {name: holder.held.turn for name, holder in self.holders.items()}

    def _unanswered(self, reason: str, last: str, began: float, *, reached: bool, firm: bool = True) -> None:
        now = time.monotonic()
        self._silence.goes_on(min(now - began, self._silence.patience))
        silence = self._silence.described(last)
        for holder in list(self.holders.values()):
            well_at = self.server.well_at
            holder.carry_out(holder.held.unanswered(reason, now, well_at, reached=reached, firm=firm, silence=silence))

    def _update_draining(self) -> None:
        reason = self._drain_reason or self._told_to_drain
        if reason == self.server.drain_reason:
            return
        logger.info("Inference server %s %s", self.server.url, f"is drained: {reason}" if reason else "is in use again")
        self._fleet.drain(self.server, reason)
        self._on_change()

    async def _look(self) -> None:
        """Adjusts the cap to the load that the server reports, and takes it out if it makes no progress."""
        self._since_look = 0.0
        serving = [holder for holder in self.holders.values() if holder.held.serves_wanted]
        if not serving:
            return
        seen = None
        if self._config.capacity == "adaptive":
            seen = await self._update_cap()
        elif any(holder.requests for holder in serving):
            seen = await self._observe()
        for holder in serving:
            holder.look(seen)

    async def _observe(self) -> Observation | None:
        await self._turns.turn()
        try:
            async with asyncio.timeout(LOAD_DEADLINE_SECONDS):
                return await self.client.observe()
        except (InferenceError, TimeoutError) as error:
            logger.debug(
                "Inference server %s does not tell its load: %s", self.server.url, str(error) or "no answer in time"
            )
            return None

    async def _update_cap(self) -> Observation | None:
        """Adjusts the cap to the load, which it returns. A server that reports none keeps its cap."""
        self._load_observed = True
        if (seen := await self._observe()) is None:
            return None
        for holder in self.holders.values():
            holder.activity.load = seen
        if self._controller is None:
            self._controller = CapacityController(self._config.max_concurrent_requests_per_server)
        before = self.server.cap
        reason = self._controller.observe(seen, self.server.in_flight)
        self._fleet.set_cap(self.server, self._controller.cap)
        if reason:
            logger.info(
                "Inference server %s is given %d requests at once, after %d: %s",
                self.server.url,
                self.server.cap,
                before,
                reason,
            )
        if self.server.cap != before:
            self._on_change()
        return seen
