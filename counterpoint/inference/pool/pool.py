"""The pool of servers, and each name of weights that it serves: the policy, an evaluation's version, an opponent, a teacher.

A name sends each request to a server, retries a failure at another, and has all servers load and prove new weights. It returns
no answer of unproven weights.

Next in the reading order of `docs/architecture.md`: `counterpoint/inference/pool/held.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from counterpoint.inference.base import (
    Completion,
    GenerateRequest,
    InferenceError,
    ParsedText,
    RequestRefused,
    SamplingParameters,
    ScoreRequest,
    Scores,
    ServerFailure,
    ServerStatus,
    WeightsNotSeen,
    WeightUpdate,
)
from counterpoint.inference.clients.failures import NOTHING_LISTENS
from counterpoint.inference.loads import LoadClaim, Stated
from counterpoint.inference.model_facts import UNBOUNDED, AnswerBounds
from counterpoint.inference.pool import calls
from counterpoint.inference.pool.fleet import FleetMember, Name
from counterpoint.inference.pool.held import Loading, Out, Proven
from counterpoint.inference.pool.holder import Holder, Vetting
from counterpoint.inference.pool.meters import PoolMeters
from counterpoint.inference.pool.servers import Places, PoolServers
from counterpoint.transport.records import Float32Array, Int32Array, Turn
from counterpoint.transport.telemetry.spans import Span

Asked = TypeVar("Asked")
Content = TypeVar("Content")

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.2
"""Pause before the second retry, doubled for each further one. The first comes at once."""

QUIET_SECONDS = 3.0
"""Seconds that a pool waits for its first server before its log says so."""

STOCK_SERVERS_PROVE_NOTHING = (
    'protocol = "openai": stock servers do not say which weights gave an answer, nor whose they are. Only the probe of each new '
    "version compares them: give these servers to one job at a time"
)

TOLD_PER_TICK = 16
"""Servers that are told of new weights in one tick of the loop: each is then looked at in the next one, by its monitor."""

LATE_SECONDS = 30.0
"""Seconds that an update waits, once a server has the weights, for those that still load or prove them."""

MAX_DESCRIBED = 256
"""Servers that `Served.fleet` describes: it is called once a second, on the loop."""


class Served(Places):
    """One name of weights at the servers of a pool. `InferencePool.model` makes it, `start` begins, `release` ends it."""

    def __init__(
        self, servers: PoolServers, name: Name, bounds: AnswerBounds, on_capacity: Callable[[int], None] | None
    ) -> None:
        """`bounds` are of the model, if it is known."""
        super().__init__(servers.fleet, name, on_capacity)
        self.meters = PoolMeters()
        """Its counts and times so far."""
        self._servers = servers
        self._config = servers.config
        self._bounds = bounds
        self._updating = asyncio.Lock()
        self._released = False

    async def start(self) -> None:
        """Returns when the first server serves the name.

        Raises `InferenceError` if none does within `startup_timeout_seconds`.
        """
        await self._servers.open()
        try:
            async with asyncio.timeout(self._config.startup_timeout_seconds):
                await self._first_serving()
        except TimeoutError:
            limit = self._config.startup_timeout_seconds
            raise InferenceError(
                f"no inference server is healthy after startup_timeout_seconds = {limit:g}: {self._describe()}"
            ) from None

    async def check_model(self, model: str) -> None:
        """Raises `ModelNotServed` if no server that takes requests has `model`. See `model_names.check`."""
        await self._servers.check_model(model, self._fleet.serving(self.name))

    async def vet(self, vetting: Vetting) -> None:
        """Vets the servers that take requests, and from now on each server before it comes into service.

        Raises as `vetting` if one does not fit. A later one is out of service instead, with the reason.
        """
        self.vetting = vetting
        for holder in self.holders.values():
            holder.vet_by(vetting)
        clients = [self.holders[server].client for server in self._fleet.serving(self.name)]
        async with asyncio.timeout(self._config.request_timeout_seconds):
            await asyncio.gather(*map(vetting, clients))

    async def stated(self) -> dict[str, Stated]:
        """Returns each server's present report on the weights under the name, by its URL.

        Only servers that take requests are asked. Leaves out servers without a report, such as stock ones, and without an
        answer.
        """
        found: dict[str, Stated] = {}
        for server in self._fleet.serving(self.name):
            holder = self.holders[server]
            try:
                identity = await holder.client.identify()
            except InferenceError as error:
                logger.debug("%s does not say which weights it has: %s", server.url, error)
                continue
            name, _ = holder.held.loads.load_at(identity, holder.held.wanted)
            if (stated := identity.stated(name)) is not None:
                found[server.url] = stated
        return found

    async def _first_serving(self) -> None:
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                return await self.until(lambda: bool(self._fleet.serving(self.name)))
        except TimeoutError:
            limit = self._config.startup_timeout_seconds
            begins = all(NOTHING_LISTENS in status.reason for status in self.status())  # as of a server that starts
            servers = ", ".join(server.url for server in self.holders) if begins and self.holders else self._describe()
            logger.info("Waiting up to %g s for a healthy inference server: %s", limit, servers)
        await self.until(lambda: bool(self._fleet.serving(self.name)))

    async def release(self) -> None:
        """Ends every request and gives the weights up. The pool closes with its last name. Safe to call twice."""
        if self._released:
            return
        self._released = True
        for waiter in self.waiting:
            if not waiter.place.done():
                waiter.place.set_exception(self._closed_error())
        await self._servers.drop(self)

    def _closed_error(self) -> InferenceError:
        return InferenceError("the inference pool is closed")

    def status(self) -> list[ServerStatus]:
        """Returns the state of every server, in the order in which they were added."""
        return [server.status(holder.held) for server, holder in self.holders.items()]

    @property
    def waiting_requests(self) -> int:
        """The number of requests that wait for a place at a server."""
        return len(self.waiting)

    def take_spans(self, run: str, step: int) -> list[Span]:
        """Returns the servers' activity for this name since the last call, as spans of `step`."""
        return [span for holder in self.holders.values() for span in holder.activity.take_spans(run, step)]

    def fleet(self) -> dict[str, Any]:
        """Returns state and totals of the servers, as `fleet.json` has them (`docs/contracts.md`)."""
        return {
            "waiting": len(self.waiting),
            "capacity": self._fleet.capacity(self.name),
            "servers": [
                each.activity.described(each.server.status(each.held))
                for each in islice(self.holders.values(), MAX_DESCRIBED)
            ],
            "servers_left_out": max(0, len(self.holders) - MAX_DESCRIBED),
        }

    def describe_sources(self) -> str:
        """Says for a person where the servers come from."""
        return self._servers.describe_sources()

    async def generate(
        self,
        prompt_ids: Int32Array | Sequence[int],
        sampling: SamplingParameters,
        *,
        affinity: str,
        routed_experts_start: int = 0,
        on_cut: Callable[[int], None] | None = None,
    ) -> Turn:
        """Makes one model call. `prompt_ids` is `[tokens]`.

        `affinity` names the rollout, which keeps to one server with its prefix. The rollouts of a group begin at one server,
        too (`Fleet.acquire`). Returns routing from token `routed_experts_start` on. Cancelling the call ends it at the server.
        `on_cut` is as of `GenerateRequest`.

        Raises `RequestRefused` for a request that no server will ever serve, and `InferenceError` when the retries or
        `request_timeout_seconds` are used up.
        """
        request = GenerateRequest(
            self.name.model, np.asarray(prompt_ids, dtype=np.int32), sampling, routed_experts_start, on_cut=on_cut
        )
        request.check(self._bounds)

        began = time.perf_counter()
        answer = await self._asked(calls.generate, request, affinity)
        turn = calls.as_turn(request, answer.content, answer.version, answer.holder.server.url)
        answer.holder.activity.generated(turn)
        self.meters.turn_seconds.observe(time.perf_counter() - began)
        return turn

    def forget_group(self, affinity: str) -> None:
        """See `Fleet.forget_group`."""
        self._fleet.forget_group(self.name, affinity)

    async def score(self, token_ids: Int32Array, start: int, *, affinity: str) -> Float32Array:
        """Returns the log-probability of each token from `start` on, of the model's whole distribution at temperature 1.

        Raises as `generate`.
        """
        request = ScoreRequest(self.name.model, token_ids, start)
        answer = await self._asked(calls.score, request, affinity)
        return answer.content.log_probabilities

    async def detokenize(self, token_ids: list[int], affinity: str) -> str:
        """Returns the text of token ids by the tokenizer of a server, special tokens included. Raises as `generate`."""
        return (await self._asked(calls.detokenize, token_ids, affinity)).content

    async def _asked(self, call: calls._Call[Asked, Content], request: Asked, affinity: str) -> _Answer[Content]:
        """Makes the request at a server, and after a failure at another one."""
        last: InferenceError | None = None
        limit = self._config.request_timeout_seconds
        due = asyncio.get_running_loop().time() + limit
        try:
            await self._servers.starts.turn()
            avoid: FleetMember | None = None
            for attempt in range(self._config.max_retries + 1):
                if attempt > 1:
                    async with asyncio.timeout_at(due):
                        await asyncio.sleep(RETRY_SECONDS * 2 ** (attempt - 2))
                server = self._free_place(affinity, avoid)
                if server is None:
                    async with asyncio.timeout_at(due):
                        server = await self._place(affinity, avoid)
                holder = self.holders[server]
                version = holder.held.version or 0  # None: the weights that it was started with
                try:
                    with holder.activity.request():
                        answer = await self._answer(holder, call, request, due)
                    holder.answered()
                    origin = answer.origin if isinstance(answer, Completion) else None
                    return _Answer(answer, holder.held.version_of(origin, version), holder)
                except (ServerFailure, RequestRefused) as error:
                    level = logging.DEBUG if isinstance(error, RequestRefused) else logging.WARNING
                    logger.log(level, "Request of %s, attempt %d, failed: %s", affinity, attempt + 1, error)
                    last, avoid = error, server
                    async with asyncio.timeout_at(due):
                        await holder.failed(error)
                    if isinstance(error, RequestRefused) and not isinstance(holder.held.state, Out):
                        raise  # the refusal of a server that refuses everything says nothing of the request
                    self.meters.retries += attempt < self._config.max_retries
                finally:
                    self._fleet.release(self.name, server)
                    self._servers.serve_waiting()
        except TimeoutError:
            self.meters.unanswered += 1
            because = last or f"it waited for a server: {self._describe()}"
            raise InferenceError(f"no answer within request_timeout_seconds = {limit:g}: {because}") from last
        self.meters.unanswered += 1
        raise InferenceError(f"no answer after {self._config.max_retries + 1} attempts; the last: {last}") from last

    async def parse(
        self,
        token_ids: list[int],
        tools: Sequence[Any],
        template_kwargs: dict[str, Any],
        *,
        cut: bool,
        server: str | None,
    ) -> ParsedText:
        """Returns a completion's text, read by the parsers of `server` or another one. See `calls.parse`."""
        clients = [each.client for each in self.holders.values() if isinstance(each.held.state, Loading | Proven)]
        if not tools and self.parses_reasoning:  # only that is left to be found, and some servers may not parse it
            clients = [client for client in clients if client.reasons]
        return await calls.parse(clients, token_ids, tools, template_kwargs, cut=cut, first=server)

    @property
    def parses_reasoning(self) -> bool:
        """Whether a server, in service or not, reports a parser of reasoning. A stock server does not."""
        return any(holder.client.reasons for holder in self.holders.values())

    async def update(self, update: WeightUpdate, on_loaded: Callable[[], None] | None = None) -> None:
        """Returns when every reachable server holds the weights and has proven it, or is out of service.

        Does not wait for a server that is still busy `LATE_SECONDS` after another was done, which goes on. Requests in flight
        go on. Calls `on_loaded` once new requests may begin at every server that takes the weights: it computes new requests
        with them, or their digest is right. Answers wait for the whole proof.

        Raises `InferenceError`, with the reasons, if servers were reached and none of them took the weights: no later attempt
        succeeds with a wrong checkpoint or probe. Its subclass `WeightsNotSeen` means that none sees the published directory.
        Raises `ValueError` for an adapter of another name than the requests give, since requests would miss it.
        """
        if update.adapter not in (None, model := self.name.model):
            raise ValueError(
                f"adapter {update.adapter!r} is to be loaded, but the requests name {model!r} and would not be computed with it: "
                f"use the pool's model {update.adapter!r}"
            )
        async with self._updating:
            began = time.perf_counter()
            if self.wanted is None and self._config.protocol == "openai":
                logger.warning(STOCK_SERVERS_PROVE_NOTHING)
            self.wanted = update
            for told, holder in enumerate(list(self.holders.values()), 1):
                holder.carry_out(holder.held.want(update))
                if not told % TOLD_PER_TICK:
                    await asyncio.sleep(0)
            await self._until_taken(update, loaded=True)
            if on_loaded is not None and not self._released and self._fleet.serving(self.name):
                on_loaded()
            await self._until_taken(update)
            if self._released:
                raise InferenceError("the inference pool was closed during a weight update")
            refusals = [found for each in self.holders.values() if (found := each.held.refusal) is not None]
            if refusals and not self._fleet.serving(self.name):
                kind = WeightsNotSeen if all(isinstance(each, WeightsNotSeen) for each in refusals) else InferenceError
                raise kind(f"no inference server took version {update.version}: {'; '.join(map(str, refusals))}")
            self.meters.update_seconds.observe(time.perf_counter() - began)

    async def _until_taken(self, update: WeightUpdate, loaded: bool = False) -> None:
        """Waits until each server is known to hold the weights or not. With `loaded`, also ends when it lets requests begin."""

        def is_known(holder: Holder) -> bool:
            return holder.held.settled or (loaded and holder.held.has(update, "begun", "held"))

        def is_taken() -> bool:
            # Asked at each change of hundreds of servers. They begin in order, so the last one is mostly the one to wait for.
            return self._released or all(map(is_known, reversed(self.holders.values())))

        await self.until(lambda: is_taken() or any(each.held.has(update, "held") for each in self.holders.values()))
        try:
            async with asyncio.timeout(LATE_SECONDS):
                await self.until(is_taken)
        except TimeoutError:
            for holder in [each for each in self.holders.values() if not is_known(each)]:
                holder.carry_out(holder.held.late(time.monotonic()))
                logger.warning(
                    "Inference server %s still loads version %d, which others serve: the run goes on without it",
                    holder.server.url,
                    update.version,
                )

    async def _answer(self, holder: Holder, call: calls._Call[Asked, Content], request: Asked, due: float) -> Content:
        """Returns the answer of one server. An answer that arrives while it loads weights waits for their proof.

        Raises `ServerFailure`, also as soon as the server goes out, and `TimeoutError` at `due`, on the loop's clock.
        """
        if not holder.held.counts:  # It was taken out, and may load again, since this request got its place.
            raise self._gone(holder)
        # One block for both, which the holder and the deadlines end: two, or two tasks, would cost each request more.
        block = self._servers.deadlines.until(due)
        try:
            with block:
                holder.requests.add(block)
                answer = await call(holder.client, request, self._bounds)
                while not holder.resolved.is_set():
                    await holder.resolved.wait()
                    await self._servers.releases.turn()
        except TimeoutError:
            if block.was_due:
                raise
            raise self._gone(holder) from None
        finally:
            holder.requests.discard(block)
        if isinstance(answer, Completion | Scores):
            holder.check_origin(answer.origin)
        return answer

    def _gone(self, holder: Holder) -> ServerFailure:
        return ServerFailure(f"{holder.server.url} went out of service: {holder.held.status[1]}")

    def _free_place(self, affinity: str, avoid: FleetMember | None) -> FleetMember | None:
        """Returns a server with a place for the request, or None if it must wait, behind those that wait already."""
        if self._released:
            raise self._closed_error()
        return None if self.waiting else self._fleet.acquire(self.name, affinity, avoid)

    async def _place(self, affinity: str, avoid: FleetMember | None) -> FleetMember:
        """Returns a server with a place for the request, first come, first served."""
        waiter = self._servers.queue(self, affinity, avoid)
        try:
            return await waiter.place
        except asyncio.CancelledError:
            if waiter in self.waiting:
                self.waiting.remove(waiter)
            elif waiter.place.done() and not waiter.place.cancelled():
                self._fleet.release(self.name, waiter.place.result())
            self._servers.serve_waiting()
            raise

    def _describe(self) -> str:
        if not self.holders:
            return f"no server is known: {self.describe_sources()}"
        return "; ".join(f"{status.url} is {status.state}: {status.reason or 'busy'}" for status in self.status())


class InferencePool(PoolServers):
    """The servers of a run, at which its policy, evaluations, opponents and teacher each have a name of weights."""

    def model(
        self,
        model: str,
        on_capacity: Callable[[int], None] | None = None,
        *,
        bounds: AnswerBounds = UNBOUNDED,
        claim: LoadClaim | None = None,
        follows: bool = False,
        limit: int | None = None,
        called: str = "inference server",
    ) -> Served:
        """Returns one more name of weights. `Served.start` and `Served.update` have it served.

        `model` is the name in requests: the base model's name at the servers, or an adapter's. `bounds` are of the model, if it
        is known. `claim` is the owner of the weights under it, or None for this process alone. `follows`: another run loads
        them, so that they may change at any time. `limit` is the most of its requests at a server, below the cap that all names
        share. Its servers' outages are listed under `called` and the URL.
        """
        claim = replace(claim or LoadClaim.of_process(), takes_over=self.config.take_over)
        served = Served(self, Name(model, claim, follows, limit, called), bounds, on_capacity)
        self.add_name(served)
        return served


class _Answer(NamedTuple, Generic[Content]):
    """The answer of a server."""

    content: Content
    version: int
    """The policy version of a completion's first token, by its origin, else the server's at the request."""
    holder: Holder
