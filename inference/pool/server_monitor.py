"""The monitor of one server: checks its health and load, updates and proves its weights, and takes it out when it fails.

Every server of a pool has a monitor, a task that runs as long as the pool. Whenever a server needs weights (a new version, a
restart, a failure), it returns to service in the same way: healthy, loaded, probed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from counterpoint.inference.base import (
    InferenceError,
    RequestRefused,
    ServerUnreachable,
    WeightUpdate,
    WrongWeights,
)
from counterpoint.inference.clients.capacity import CapacityController, Observation
from counterpoint.inference.clients.client import Identity, ServerClient
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.loads import Claim, Origin
from counterpoint.inference.pool import liveness
from counterpoint.inference.pool.activity import ServerActivity
from counterpoint.inference.pool.deadlines import end
from counterpoint.inference.pool.fleet import Fleet, Server, State
from counterpoint.inference.pool.progress import Progress
from counterpoint.transport.outages import Kind, Outages

logger = logging.getLogger(__name__)

KEPT_LOADS = 512
"""The newest loads of a server whose answers are accepted; of up to twice as many it keeps the numbers."""

HEALTH_DEADLINE_SECONDS = 10.0
"""Deadline of one health check. Long, since a server may wait for CPU time on a busy machine."""

LOAD_DEADLINE_SECONDS = 2.0
"""Deadline of one observation of the load, which new weights may have to wait for."""

STARTING_SECONDS = 0.1
"""Longest time between two checks of a server that has not served yet: a job starts, and waits for it."""

RESTARTED = "it was restarted, and holds the weights it was started with"
"""The reason of a server whose process is not the one that was proven."""

UNLOAD_SECONDS = 5.0
"""How long a server may take, when the pool closes, to give up the run's weights."""

SLOW_CHECKS_IN_A_ROW = 3
"""Health checks that miss the deadline before the server is taken out. One that refuses a connection is out at once."""


class ProbeFailed(RequestRefused):
    """The server accepted the weights but does not compute with them, as its digest or log-probabilities show."""


class ServerMonitor:
    """The monitor of one server."""

    def __init__(
        self,
        server: Server,
        client: ServerClient,
        fleet: Fleet,
        config: PoolConfig,
        model: str,
        on_change: Callable[[], None],
        claim: Claim,
        follows: bool,
        outages: Outages,
        called: str = "inference server",
    ) -> None:
        """`claim` is the owner of what it loads. `follows`: others load the weights of `model`, at any time.

        `outages` gets the server's; there it is named `called` and its URL.
        """
        self.server = server
        self._outages = outages
        self._who = f"{called} {server.url}"
        self.well_at: float | None = None
        """When it answered last, in unix seconds."""
        self._served_at: float | None = None
        """When it answered a request last, or began to serve."""
        self.activity = ServerActivity(server.url)
        self.client = client
        self.wanted: WeightUpdate | None = None
        """The weights that the server must hold to serve. None: those that it was started with."""
        self.concluded: WeightUpdate | None = None
        """The last `wanted` for which it is known whether the server holds it."""
        self.begun: WeightUpdate | None = None
        """The last `wanted` that the server has begun to load so that requests which come now are computed with it."""
        self.loaded: WeightUpdate | None = None
        """The last `wanted` whose digest the server has shown: it takes requests, and their answers wait for the probe."""
        self.refusal: RequestRefused | None = None
        """Why it is out, if it would not take the weights, or took them and failed the probe."""
        self.requests: set[asyncio.Timeout] = set()
        """The timeouts of the requests at the server: each expires when it is taken out."""
        self.resolved = asyncio.Event()
        """Set unless the server is loading."""
        self.resolved.set()
        self._fleet = fleet
        self._config = config
        self._model = model
        self._on_change = on_change
        self._claim = claim
        self._follows = follows
        self._loads: dict[tuple[str | None, int | None], int | None] = {}
        """By name and number: the versions of the loads whose answers are accepted, which this pool made at the process
        `_loads_of`; None of what it found there."""
        self._loads_of: str | None = None
        self._unproven: tuple[str | None, int | None] = (None, None)
        """The last of them that was loaded, which is removed if its proof fails."""
        self._has_loaded = False
        """Whether there is one of this pool's own among them."""
        self._found: tuple[str, str | None, int] | None = None
        """Where the pool loads nothing: the process, the name and the load that it began with."""
        self._wake = asyncio.Event()
        self._held: WeightUpdate | None = None
        self._controller: CapacityController | None = None
        """None until the server has reported its load."""
        self._load_observed = config.capacity == "fixed"
        self._drain_reason = ""
        """Why the pool drains it; empty if it does not."""
        self._server_drains = False
        """Whether the server itself asks to be drained."""
        self._slow_checks = 0
        self._silent = False
        """Whether it went out because it did not answer in time, or was not reached. No update waits for it until it serves."""
        longest_pause = 2 * config.health_interval_seconds + HEALTH_DEADLINE_SECONDS + LOAD_DEADLINE_SECONDS
        self._progress = Progress(config.request_timeout_seconds, longest_pause)
        self._mute = False
        """Whether it went out because it answered no requests. It has to answer one before it serves again."""
        self._in_doubt = False
        """Whether it is being asked for one token, as requests have failed."""
        self._not_before = 0.0
        self._has_served = False
        self._warned_of_precision = False

    def set_wanted(self, update: WeightUpdate) -> None:
        """Sets new weights, which are loaded at once, however often the server has failed before."""
        self.wanted = update
        if self._silent:
            self.concluded = update
        self._not_before = 0.0
        self._wake.set()

    def has(self, update: WeightUpdate) -> bool:
        """Whether the server takes requests with these weights."""
        return self.loaded is update or self._holds(update)

    def go_on_without(self, update: WeightUpdate) -> None:
        """Has nobody wait any longer for this server, which goes on to take `update`. It counts again once it serves."""
        self.concluded, self._silent = update, True
        self.loaded = self.begun = None
        self._fleet.is_late(self.server)
        self._give_up_requests()
        logger.warning(
            "Inference server %s still loads version %d, which others serve: the run goes on without it",
            self.server.url,
            update.version,
        )

    def drain(self, reason: str) -> None:
        """Stops new requests while there is a reason."""
        self._drain_reason = reason
        self._update_draining()

    def check_now(self) -> None:
        """Checks the server's health without waiting for the next interval."""
        self._wake.set()

    async def doubt(self, failure: InferenceError) -> None:
        """Takes the server out, after requests have failed, unless it generates a token.

        The failure of a request may be its own: what it asks for says nothing of the server. A plain request does.
        """
        if self._in_doubt:
            return
        self._in_doubt, failures = True, self.server.failures
        try:
            await liveness.ask_for_a_sign(self.client, self._model, self._observe)
        except InferenceError as error:
            if self._fleet.is_doubted(self.server):
                # Healthy or not, it may return at its next check, no sooner.
                self.take_out(
                    f"{failures} requests in a row failed (the last: {failure}), and so did one for one token: {error}",
                    since=self.well_at,
                )
        else:
            self._fleet.succeeded(self.server)
            self.served()
            logger.info(
                "Inference server %s stays in service: %d requests in a row failed, and it generates tokens",
                self.server.url,
                failures,
            )
        finally:
            self._in_doubt = False

    async def run(self) -> None:
        """Monitors the server until cancelled."""
        while True:
            self._wake.clear()
            await self._check()
            try:
                async with asyncio.timeout(self._interval):
                    await self._wake.wait()
            except TimeoutError:
                # Only at regular intervals: two observations right after a failure would include the same burst twice.
                if self._holds(self.wanted):
                    await self._look()

    @property
    def _interval(self) -> float:
        regular = self._config.health_interval_seconds
        return regular if self._has_served else min(regular, STARTING_SECONDS)

    async def _check(self) -> None:
        wanted = self.wanted
        try:
            async with asyncio.timeout(HEALTH_DEADLINE_SECONDS):
                identity = await self.client.identify()
        except TimeoutError:
            self._slow_checks += 1
            if self._slow_checks >= SLOW_CHECKS_IN_A_ROW or not self._holds(wanted):
                self._silent = True
                self.take_out(
                    f"no answer to a health check within {HEALTH_DEADLINE_SECONDS:g} s, {self._slow_checks} times",
                    since=self.well_at,
                )
        except InferenceError as error:
            if isinstance(error, ServerUnreachable):  # each attempt at a host that is gone may take seconds
                self._silent = True
            self.take_out(str(error), since=self.well_at)
        else:
            self._slow_checks = 0
            self.well_at = time.time()
            self._server_drains = identity.draining
            self._update_draining()
            if self.server.state is State.SERVING:
                self._compare(identity)
            if not self._holds(wanted) and time.monotonic() >= self._not_before:
                if not self._load_observed:
                    await self._update_cap()
                await self._bring_up(wanted, identity)
        if self.wanted is wanted:
            self.concluded = wanted
            self._on_change()

    def _update_draining(self) -> None:
        reason = self._drain_reason or ("it was told to drain" if self._server_drains else "")
        if reason == self.server.drain_reason:
            return
        logger.info("Inference server %s %s", self.server.url, f"is drained: {reason}" if reason else "is in use again")
        self._fleet.drain(self.server, reason)
        self._on_change()

    async def _look(self) -> None:
        """Adjusts the cap to the load that the server reports, and takes it out if it makes no progress."""
        seen = None
        if self._config.capacity == "adaptive":
            seen = await self._update_cap()
        elif self.requests:
            seen = await self._observe()
        reason = self._progress.observe(time.monotonic(), len(self.requests), self.activity.ended_requests, seen)
        if reason and self._holds(self.wanted):
            self._mute = self._silent = True
            self.take_out(reason, since=self._served_at)

    async def _observe(self) -> Observation | None:
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
        self.activity.load = seen
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

    def _holds(self, wanted: WeightUpdate | None) -> bool:
        return self.server.state is State.SERVING and self._held is wanted

    def _compare(self, identity: Identity) -> None:
        """Takes the server out if another process answers than the one that was proven, or it has got other weights."""
        if identity.instance != self.server.instance:
            self.take_out(RESTARTED)
            return
        found = self._load_at(identity, self._held)
        if not self._follows and identity.weights is not None and found not in self._loads:
            missing = found[1] is None
            what = "it has no such adapter any more" if missing else f"it has load {found[1]}, which is not the run's"
            self.take_out(f"someone else changed the weights of {self._model!r}: {what}")

    def _load_at(self, identity: Identity, held: WeightUpdate | None) -> tuple[str | None, int | None]:
        """Returns name and number of the load that a server has in place of `held`; None: of what the pool did not load.

        Without a number it has no such adapter.
        """
        adapter = self._model if self._model in identity.adapters else None
        if held is not None:
            adapter = held.adapter
        return adapter, identity.weights if adapter is None else identity.adapters.get(adapter)

    async def _bring_up(self, wanted: WeightUpdate | None, identity: Identity) -> None:
        self._fleet.begin_loading(self.server)
        self.resolved.clear()
        self._on_change()
        lost: list[str] = []
        try:
            async with asyncio.timeout(self._config.update_timeout_seconds) as loading:
                if self._mute:
                    await liveness.ask_for_an_answer(self.client, self._model)
                    self._mute = False
                if wanted is not None:
                    async with liveness.watched(
                        self.client, self._config.health_interval_seconds, loading, lost.append
                    ):
                        await self._load_and_prove(wanted, identity.instance)
                else:
                    self._accept_found(identity)
        except TimeoutError:
            limit = self._config.update_timeout_seconds
            self._silent = True
            because = "".join(lost) or f"it was not done within update_timeout_seconds = {limit:g}"
            since = time.time() - liveness.SILENT_SECONDS if lost else None
            self.take_out(
                f"version {None if wanted is None else wanted.version} was to be loaded and proven, and {because}",
                since=since,
            )
        except InferenceError as error:
            self._loads.pop(self._unproven, None)
            self.take_out(str(error), refusal=error if isinstance(error, RequestRefused) else None)
        except asyncio.CancelledError:  # answers that wait for the proof are of unproven weights
            self._fleet.take_out(self.server, "the pool was closed before the weights were proven")
            self._give_up_requests()
            raise
        else:
            if wanted is None or self.loaded is not wanted:
                self._begin_serving(wanted, identity.instance)
        finally:
            self.resolved.set()

    def _accept_found(self, identity: Identity) -> None:
        """Accepts the weights that a server has, where the pool loads none.

        Raises `RequestRefused` if they are others than at first. What a server was started with is the same after a restart.
        """
        name, number = self._load_at(identity, None)
        load = number or 0
        found = (identity.instance if load else "", name, load)
        former = self._found  # of another name, the adapter was not there yet
        if former is not None and former[1] == name and former != found and not self._follows:
            before = former[2]
            raise RequestRefused(
                f"{self.server.url} has other weights under the name {self._model!r} than at first: someone else changed them "
                f"(it was load {before}, and is load {load})"
            )
        self._found, self._loads, self._loads_of = found, {(name, load): None}, identity.instance

    async def _load_and_prove(self, wanted: WeightUpdate, instance: str) -> None:
        self.loaded = self.begun = None
        began = time.monotonic()
        claim, begins = self._claimed(instance), partial(self._begin_requests, wanted, instance)
        with self.activity.timed("load", wanted.version):
            held = await self.client.load(wanted, claim, begins)
        if held is not None:
            if not self._has_loaded:  # what was found there under another name is none of the run's
                self._loads = {each: version for each, version in self._loads.items() if each[0] == wanted.adapter}
            self._unproven = (wanted.adapter, held.load)
            self._loads[self._unproven] = wanted.version
            self._has_loaded = True
            if len(self._loads) > 2 * KEPT_LOADS:  # no request lasts that long
                oldest = held.load - KEPT_LOADS
                self._loads = {each: version for each, version in self._loads.items() if (each[1] or 0) > oldest}
        if held is not None and (others := wanted.probe.mismatched_layers(held)) is not None:
            raise ProbeFailed(
                f"{self.server.url} accepted version {wanted.version} but computes with other weights: {others}"
            )
        if held is not None and wanted.probe.digests and held.dtype not in wanted.probe.digests:
            self._warn_of_precision(held.dtype, wanted)
        loaded = time.monotonic()
        if held is not None and wanted.probe.compares(held) and self.server.counted:
            # It served until now, and holds what was published. New requests begin beside the probe, and wait for it.
            self._begin_serving(wanted, instance)
            self.loaded = wanted
            self._on_change()
        with self.activity.timed("probe", wanted.version):
            answer = await self.client.probe(wanted.adapter or self._model, wanted.probe.token_ids)
        if answer.origin is not None and not self._is_accepted(answer.origin):
            found = answer.origin.described
            raise WrongWeights(f"{self.server.url} took version {wanted.version}, and its probe is of others: {found}")
        dtype = None if held is None else held.dtype
        mismatch = wanted.probe.mismatch(answer.log_probabilities, self._config.probe_tolerance, dtype)
        if mismatch is not None:
            raise ProbeFailed(f"{self.server.url} took version {wanted.version} and failed its probe: {mismatch}")
        self._unproven = (None, None)
        logger.info(
            "Inference server %s serves version %d: loaded in %.3f s, proven in %.3f s",
            self.server.url,
            wanted.version,
            loaded - began,
            time.monotonic() - loaded,
        )

    def _begin_requests(self, wanted: WeightUpdate, instance: str) -> None:
        """Lets requests begin at a server that served until now and computes them with the weights that it is loading.

        Their answers say which load computed them, and wait for its proof.
        """
        if self.server.counted:
            self.begun = wanted
            self._fleet.begin_serving(self.server, wanted.version, instance)
            self._on_change()

    def version_of(self, origin: Origin | None, asked: int) -> int:
        """Returns the version with which an accepted answer began, or `asked` where the pool did not load it."""
        found = None if origin is None else self._loads.get((origin.name, origin.first))
        return asked if found is None else found

    def _claimed(self, instance: str) -> Claim:
        """Returns the claim for a load. Only the first one at a process takes over from others."""
        if self._loads_of != instance:
            self._loads, self._loads_of, self._has_loaded = {}, instance, False
        return replace(self._claim, takes_over=self._claim.takes_over and not self._has_loaded)

    def _is_accepted(self, origin: Origin) -> bool:
        """Whether only weights computed an answer that this pool loaded, or found where it loads none."""
        if origin.instance != self._loads_of:
            return False
        numbers = range(origin.first, origin.last + 1)
        return self._follows or all((origin.name, number) in self._loads for number in numbers)

    def _warn_of_precision(self, dtype: str, wanted: WeightUpdate) -> None:
        if self._warned_of_precision:
            return
        self._warned_of_precision = True
        logger.warning(
            "Inference server %s computes in %s, and the trainer publishes digests for %s: only the probe proves this server's "
            "weights, which misses small steps. Set inference.dtype to what the servers use, or trainer.server_dtypes",
            self.server.url,
            dtype,
            ", ".join(sorted(wanted.probe.digests)),
        )

    def _begin_serving(self, wanted: WeightUpdate | None, instance: str) -> None:
        if wanted is None:
            logger.info("Inference server %s is healthy, with the weights it was started with", self.server.url)
        self._held, self.refusal, self._has_served, self._silent = wanted, None, True, False
        self._progress.begin()
        self._fleet.begin_serving(self.server, None if wanted is None else wanted.version, instance)
        self.activity.serves(instance)
        self._outages.end(self._who)
        self.served()

    def check_origin(self, origin: Origin | None) -> None:
        """Takes the server out and raises `WrongWeights` if other weights computed an answer than those that were proven.

        A server may be restarted between two health checks, and then computes with the weights it was started with; or
        someone else may have loaded others.
        """
        if origin is None or self._is_accepted(origin):
            return
        restarted = origin.instance != self._loads_of
        found = (
            RESTARTED if restarted else f"it answers with weights that this run did not load there: {origin.described}"
        )
        self.take_out(found)
        self.check_now()
        raise WrongWeights(f"the answer of {self.server.url} is of other weights: {found}")

    def forget(self) -> None:
        """Ends what there is of a server that is no longer in use."""
        self._outages.end(self._who)
        self.client.close()

    async def give_up_weights(self) -> None:
        """Gives the server's weights up when the run ends: its adapter is unloaded, its full weights may be replaced by anyone.

        A server that cannot be reached keeps an adapter until others need the room.
        """
        if self.wanted is None or self.server.state is State.UNKNOWN:
            return
        try:
            async with asyncio.timeout(UNLOAD_SECONDS):
                await self.client.unload(self.wanted.adapter, replace(self._claim, takes_over=False))
        except (InferenceError, TimeoutError) as error:
            what = "The weights" if self.wanted.adapter is None else f"Adapter {self.wanted.adapter}"
            logger.info("%s at %s were not given up: %s", what, self.server.url, str(error) or "no answer in time")

    def served(self) -> None:
        """Notes that the server has answered a request just now: an outage begins no sooner."""
        self.well_at = self._served_at = time.time()

    def take_out(self, reason: str, refusal: RequestRefused | None = None, since: float | None = None) -> None:
        """Stops new requests; those at the server are retried elsewhere.

        `since` is when it was last known to be well, in unix seconds; None: now.
        """
        first = self.server.state is not State.OUT
        level = (logging.INFO if self.server.state is State.UNKNOWN else logging.ERROR) if first else None
        what = "takes no traffic" if self._has_served else "is not ready yet"
        outage = self._outages.begin(Kind.SERVER, self._who, what, reason, since=since, level=level)
        self._fleet.take_out(self.server, reason)
        self.begun = None
        self.activity.went_out(reason, outage.since)
        self.refusal = refusal
        if first:
            self._not_before = time.monotonic() + self._config.health_interval_seconds * self._fleet.intervals_out(
                self.server
            )
        self._give_up_requests()
        self._on_change()

    def _give_up_requests(self) -> None:
        requests, self.requests = self.requests, set()
        for request in requests:
            end(request)
