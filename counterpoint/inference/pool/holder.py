"""One name of weights at one server: carries out the instructions of its machine (`held`), and reports their results.

Loads and proofs run in a separate task, so that health checks and other names go on beside them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from counterpoint.inference.base import InferenceError, ServerFailure, WrongWeights
from counterpoint.inference.clients.capacity import Observation
from counterpoint.inference.clients.client import ServerClient
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.loads import Origin
from counterpoint.inference.per_tick_limiter import PerTickLimiter
from counterpoint.inference.pool import held as machine
from counterpoint.inference.pool import liveness
from counterpoint.inference.pool.activity import ServerActivity
from counterpoint.inference.pool.deadlines import DeadlineBlock
from counterpoint.inference.pool.fleet import FleetMember, Name
from counterpoint.inference.pool.held import Held
from counterpoint.inference.pool.progress import ServerProgress
from counterpoint.transport.outages import OutageKind, Outages

logger = logging.getLogger(__name__)

PRECISION = (
    "Inference server %s computes in %s, and the trainer publishes digests for %s: only the probe proves this server's weights, "
    "which misses small steps. Set inference.dtype to what the servers use, or trainer.server_dtypes"
)

Vetting = Callable[[ServerClient], Awaitable[None]]
"""Asks a server whether it fits. Raises `InferenceError`, and `ValueError` for a server that does not."""

UNLOAD_SECONDS = 5.0
"""Seconds that a server may take to give up unused weights."""


class Holder:
    """One name at one server."""

    def __init__(
        self,
        server: FleetMember,
        name: Name,
        client: ServerClient,
        config: PoolConfig,
        *,
        check: Callable[[], None],
        observe: Callable[[], Awaitable[Observation | None]],
        on_change: Callable[[bool], None],
        outages: Outages,
        turns: PerTickLimiter,
        longest_pause: float,
    ) -> None:
        """`check` has the server's health checked now, and `observe` reads its load.

        `on_change` is called when the state has changed, with whether the server begins or ceases to count towards the capacity.
        `turns` is as of `ServerMonitor`, `longest_pause` as of `ServerProgress`.
        """
        self.server = server
        self.client = client
        self.held = Held(server.url, name.model, follows=name.follows, interval=config.health_interval_seconds)
        server.names[name] = self.held
        self.activity = ServerActivity(server.url)
        self.requests: set[DeadlineBlock] = set()
        """The blocks of the requests at the server. Each ends when the server goes out."""
        self.resolved = asyncio.Event()
        """Set unless answers have to wait for a proof."""
        self.resolved.set()
        self.at_rest: tuple[object, ...] | None = None
        """The machine's turn when a check changed nothing, as it served what it wants, and what the server said of its weights. A
        check that finds the same of both changes nothing either."""
        self._vetting: Vetting | None = None
        self._name = name
        self._who = f"{name.called} {server.url}"
        self._config = config
        self._check = check
        self._observe = observe
        self._on_change = on_change
        self._outages = outages
        self._turns = turns
        self._progress = ServerProgress(config.request_timeout_seconds, longest_pause)
        self._served_at: float | None = None
        """The time of its last answer to a request, or of its beginning to serve."""
        self._told, self._told_settled, self._told_counts = self.held.state, False, False
        """The state of the last report."""
        self._step: machine.AskToken | machine.LoadVersion | machine.Prove | None = None
        """The next step."""
        self._work: asyncio.Task[None] | None = None
        self._began = self._loaded = 0.0
        self._over = False

    def vet_by(self, vetting: Vetting) -> None:
        """Vets the server from now on whenever it comes into service. It stays out while it does not fit."""
        self._vetting, self.held.vets = vetting, True

    def carry_out(self, instructions: Sequence[machine.Instruction] = ()) -> None:
        """Begins the machine's instructions for an event, and reports its new state."""
        if self._over:
            return
        for instruction in instructions:
            match instruction:
                case machine.AskToken() | machine.LoadVersion() | machine.Prove():
                    self._step = instruction
                    if self._work is None:
                        self._work = asyncio.create_task(self._do_steps(), name=f"weights of {self.server.url}")
                        self._work.add_done_callback(self._work_ended)
                case machine.Check():
                    self._check()
                case machine.EndRequests():
                    self._end_requests()
                case machine.Serves():
                    self._begin_serving(instruction)
                case machine.GoneOut():
                    self._go_out(instruction)
                case machine.MissesDigests(dtype, update):
                    published = ", ".join(sorted(update.probe.digests))
                    logger.warning(PRECISION, self.server.url, dtype, published)
        if self._told is self.held.state and self._told_settled == self.held.settled:
            return
        self._told, self._told_settled = self.held.state, self.held.settled
        counted, self._told_counts = self._told_counts, self.held.counts
        if self.held.is_proving:
            self.resolved.clear()
        else:
            self.resolved.set()
        self._on_change(counted != self._told_counts)

    # --- loads and proofs ---

    async def _do_steps(self) -> None:
        assert self._step is not None
        attempt, limit = self._step.attempt, self._config.update_timeout_seconds
        try:
            async with asyncio.timeout(limit):
                while self._step is not None:
                    await self._turns.turn()
                    step, self._step = self._step, None
                    await self._do(step)
        except TimeoutError:
            error = InferenceError(f"it was not done within update_timeout_seconds = {limit:g}")
            self.carry_out(self.held.failed(attempt, error, time.monotonic(), late=True))
        except InferenceError as error:
            self.carry_out(self.held.failed(attempt, error, time.monotonic()))

    async def _do(self, step: machine.AskToken | machine.LoadVersion | machine.Prove) -> None:
        attempt = step.attempt
        match step:
            case machine.AskToken():
                if self._vetting is None:
                    await liveness.ask_for_an_answer(self.client, self._name.model)
                else:
                    try:
                        await self._vetting(self.client)
                    except ValueError as error:
                        raise ServerFailure(str(error)) from error  # no refusal: it may be restarted as it should be
                self.carry_out(self.held.answers(attempt, time.monotonic()))
            case machine.LoadVersion(_, update, first):
                self._began = time.monotonic()
                claim = replace(self._name.claim, takes_over=self._name.claim.takes_over and first)
                with self.activity.timed("load", update.version):
                    held = await self.client.load(update, claim, lambda: self.carry_out(self.held.begun(attempt)))
                self._loaded = time.monotonic()
                self.carry_out(self.held.loaded(attempt, held, self._loaded))
            case machine.Prove(_, update):
                with self.activity.timed("probe", update.version):
                    scores = await self.client.probe(update.adapter or self._name.model, update.probe.token_ids)
                self.carry_out(self.held.probed(attempt, scores, self._config.probe_tolerance, time.monotonic()))

    def _abandon(self) -> None:
        work, self._step, self._work = self._work, None, None
        if work is not None and work is not asyncio.current_task():
            work.cancel()

    def _work_ended(self, task: asyncio.Task[None]) -> None:
        if self._work is task:
            self._work = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("The weights of %s are loaded no more; this is a defect", self.server.url, exc_info=error)
            self.take_out(f"its weights could not be loaded: {error!r}")

    def _begin_serving(self, serves: machine.Serves) -> None:
        if serves.update is None:
            what = serves.stated or "the weights that it has"
            logger.info("Inference server %s is healthy, with %s", self.server.url, what)
        else:
            logger.info(
                "Inference server %s serves version %d: loaded in %.3f s, proven in %.3f s",
                self.server.url,
                serves.update.version,
                self._loaded - self._began,
                time.monotonic() - self._loaded,
            )
        self._progress.begin()
        self.activity.serves(serves.instance)
        self._outages.end(self._who)
        self._note_life()

    async def give_up(self, *, last: bool) -> None:
        """Ends the name's requests, and gives its weights up: unloads an adapter, and lets anyone replace full weights.

        `last`: no name is left, and an outage stays in the list, since it has not ended. A server that cannot be reached keeps
        an adapter until others need the room.
        """
        update, reached = self.held.wanted, not isinstance(self.held.state, machine.Unknown)
        self.held.close()
        self.carry_out()
        self._end_requests()
        self._end(outage=not last)
        if update is None or not reached:
            return
        try:
            async with asyncio.timeout(UNLOAD_SECONDS):
                await self.client.unload(update.adapter, replace(self._name.claim, takes_over=False))
        except (InferenceError, TimeoutError) as error:
            what = "The weights" if update.adapter is None else f"Adapter {update.adapter}"
            logger.info("%s at %s were not given up: %s", what, self.server.url, str(error) or "no answer in time")

    def forget(self) -> None:
        """Ends all tasks of a place that is no longer in use."""
        self._end(outage=True)

    def _end(self, *, outage: bool) -> None:
        self._over = True
        self._abandon()
        if outage:
            self._outages.end(self._who)

    # --- requests ---

    def answered(self) -> None:
        """Notes that the server has answered a request."""
        self.held.request_answered()
        self._note_life()

    def _note_life(self) -> None:
        self.server.well_at = self._served_at = time.time()

    async def failed(self, error: InferenceError) -> None:
        """Notes that a request has failed.

        The request itself may be at fault: its failure says nothing of the server. After several failures the server goes out
        unless it answers a plain request.
        """
        instructions = self.held.request_failed(error, time.monotonic())
        self.carry_out(instructions)
        for doubt in instructions:
            if isinstance(doubt, machine.Doubt):
                await self._ask_for_a_sign(doubt)

    async def _ask_for_a_sign(self, doubt: machine.Doubt) -> None:
        found: InferenceError | None = None
        try:
            await liveness.ask_for_a_sign(self.client, self._name.model, self._observe)
        except InferenceError as error:
            found = error
        except asyncio.CancelledError:
            self.held.doubt = None
            raise
        else:
            self._note_life()
            logger.info(
                "Inference server %s stays in service: %d requests in a row failed, and it generates tokens",
                self.server.url,
                doubt.failures,
            )
        self.carry_out(self.held.token_asked(found, time.monotonic(), self.server.well_at))

    def check_origin(self, origin: Origin | None) -> None:
        """Takes the server out and raises `WrongWeights` if other weights computed an answer than the proven ones.

        For example, a server was restarted between two health checks, and computes with the weights it was started with, or
        someone else has loaded others.
        """
        if found := self.held.stranger(origin):
            self.take_out(found)
            self._check()
            raise WrongWeights(f"the answer of {self.server.url} is of other weights: {found}")

    def look(self, seen: Observation | None) -> None:
        """Takes the server out if it makes no progress with the requests of this name. `seen` is its load, if reported."""
        now = time.monotonic()
        reason = self._progress.observe(now, len(self.requests), self.activity.ended_requests, seen)
        if reason and self.held.serves_wanted:
            self.carry_out(self.held.unfit(reason, now, self._served_at, mute=True))

    # --- out of service ---

    def take_out(self, reason: str) -> None:
        """Stops new requests. Those at the server are retried at others."""
        self.carry_out(self.held.unfit(reason, time.monotonic()))

    def lose(self, reason: str) -> None:
        """Takes the server out when no monitor checks it any more: no update waits for it."""
        now, well_at = time.monotonic(), self.server.well_at
        self.carry_out(self.held.unanswered(reason, now, well_at, reached=False, firm=True, silence=reason))

    def _go_out(self, gone: machine.GoneOut) -> None:
        what = "takes no traffic" if self.held.has_served else "is not ready yet"
        levels = {machine.Unknown: logging.INFO, machine.Out: None}
        level = levels.get(type(gone.former), logging.ERROR)
        outage = self._outages.begin(OutageKind.SERVER, self._who, what, gone.reason, since=gone.since, level=level)
        self.activity.went_out(gone.reason, outage.since)
        self._abandon()
        self._end_requests()

    def _end_requests(self) -> None:
        requests, self.requests = self.requests, set()
        for request in requests:
            request.end()
