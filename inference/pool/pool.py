"""The pool of servers: sends each request to a server, retries a failure at another, and updates and proves weights.

It executes the decisions of `fleet`. The servers' monitors check them, and `sources` lists them. No answer is returned that
unproven weights computed. One pool serves one run's orchestrator, on its event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
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
    WrongAnswer,
)
from counterpoint.inference.clients.client import BinaryClient, ServerClient
from counterpoint.inference.clients.http_sessions import HttpSessions
from counterpoint.inference.clients.openai_client import OpenAIClient
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.loads import Claim
from counterpoint.inference.model_facts import UNBOUNDED, AnswerBounds
from counterpoint.inference.per_tick_limiter import PerTickLimiter
from counterpoint.inference.pool import calls, model_names
from counterpoint.inference.pool.deadlines import Deadlines
from counterpoint.inference.pool.fleet import Fleet, Server, State
from counterpoint.inference.pool.meters import PoolMeters
from counterpoint.inference.pool.server_monitor import ServerMonitor
from counterpoint.inference.pool.sources import Listing, Sources
from counterpoint.transport.outages import Outages
from counterpoint.transport.records import Float32Array, Int32Array, Turn
from counterpoint.transport.telemetry.spans import Span

Asked = TypeVar("Asked")
Content = TypeVar("Content")

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.2
"""Pause before the second retry, doubled for each further one. The first comes at once."""

QUIET_SECONDS = 3.0
"""How long a pool waits for its first server before its log says so."""

STARTS_PER_TICK = 8
"""Requests sent in one tick of the loop: a step begins with hundreds at once, which would delay everything else. It is twice
`binary_http.ANSWERS_PER_TICK`: whoever gets an answer then sends the next request at once, whatever comes first in the tick."""

STOCK_SERVERS_PROVE_NOTHING = (
    'protocol = "openai": stock servers do not say which weights gave an answer, nor whose they are. Only the probe of each new '
    "version compares them: give these servers to one job at a time"
)

LATE_SECONDS = 30.0
"""How long an update waits, once a server has the weights, for those that still load or prove them."""

MAX_DESCRIBED = 256
"""Servers that `InferencePool.fleet` describes: it is called once a second, on the loop."""


class InferencePool:
    """The servers of `config`. `model` is the name in requests: the base model's name at the servers, or an adapter's.

    `operator_file` is as of `Sources`; `bounds` are of the model, where it is known. `claim` is the owner of the weights that
    the pool loads; None: this process alone. `follows`: another run loads the weights of `model`, so that they may change at
    any time. `outages` gets those of its servers, where each is named `called` and its URL.
    """

    def __init__(
        self,
        config: PoolConfig,
        model: str,
        on_capacity: Callable[[int], None] | None = None,
        operator_file: Path | None = None,
        bounds: AnswerBounds = UNBOUNDED,
        claim: Claim | None = None,
        *,
        follows: bool = False,
        outages: Outages | None = None,
        called: str = "inference server",
    ) -> None:
        self._config = config
        self._bounds = bounds
        self._model = model
        self._claim = replace(claim or Claim.of_process(), takes_over=config.take_over)
        self._follows = follows
        self._outages = Outages() if outages is None else outages
        self._called = called
        self._on_capacity = on_capacity
        self._capacity = 0
        self._fleet = Fleet((), config.max_concurrent_requests_per_server)
        self._sources = Sources(config, operator_file)
        self._connections = HttpSessions(config)
        self._monitors: dict[Server, ServerMonitor] = {}
        self._tasks: dict[Server, asyncio.Task[None]] = {}
        """The monitors' tasks."""
        self._sources_task: asyncio.Task[None] | None = None
        self._opened = False
        self._wanted: WeightUpdate | None = None
        self._waiting: deque[_Waiter] = deque()
        self._starts = PerTickLimiter(STARTS_PER_TICK)
        self._deadlines = Deadlines()
        """Those of the requests at servers."""
        self._changed = asyncio.Event()
        self._updating = asyncio.Lock()
        self._closed = False
        self.meters = PoolMeters()
        """What it has counted and timed so far."""

    async def start(self) -> None:
        """Returns when the first server is healthy. Raises `InferenceError` if none is within `startup_timeout_seconds`."""
        await self._connections.__aenter__()
        self._opened = True
        await self._apply_listing(await self._sources.read())
        if self._sources.changes:
            self._sources_task = asyncio.create_task(self._follow_sources(), name="follower of the servers' sources")
            self._sources_task.add_done_callback(self._sources_task_ended)
        try:
            async with asyncio.timeout(self._config.startup_timeout_seconds):
                await self._first_serving()
        except TimeoutError:
            limit = self._config.startup_timeout_seconds
            raise InferenceError(f"no inference server is healthy after {limit:g} s: {self._describe()}") from None

    async def check_model(self, model: str) -> None:
        """Raises `ModelNotServed` if no server that takes requests has `model`. See `model_names.check`."""
        await model_names.check(model, [server.url for server in self._fleet.serving], self._connections)

    async def _first_serving(self) -> None:
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                return await self._until(lambda: bool(self._fleet.serving))
        except TimeoutError:
            limit = self._config.startup_timeout_seconds
            logger.info("Waiting up to %g s for a healthy inference server: %s", limit, self._describe())
        await self._until(lambda: bool(self._fleet.serving))

    async def close(self) -> None:
        """Ends every request, the monitors and the connections. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for waiter in self._waiting:
            if not waiter.place.done():
                waiter.place.set_exception(InferenceError("the inference pool is closed"))
        tasks = [*self._tasks.values(), *([self._sources_task] if self._sources_task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._opened:
            await asyncio.gather(*(monitor.give_up_weights() for monitor in self._monitors.values()))
            await self._connections.__aexit__(None, None, None)

    def status(self) -> list[ServerStatus]:
        """Returns the state of every server, in the order in which they were added."""
        return [server.status() for server in self._fleet.servers]

    @property
    def waiting_requests(self) -> int:
        """How many requests wait for a place at a server."""
        return len(self._waiting)

    def take_spans(self, run: str, step: int) -> list[Span]:
        """Returns what the servers did since the last call, for this pool, as spans of `step`."""
        return [span for monitor in self._monitors.values() for span in monitor.activity.take_spans(run, step)]

    def fleet(self) -> dict[str, Any]:
        """Returns state and totals of the servers, as `fleet.json` has them (`docs/contracts.md`)."""
        return {
            "waiting": len(self._waiting),
            "capacity": self._fleet.capacity,
            "servers": [
                each.activity.described(each.server.status()) for each in islice(self._monitors.values(), MAX_DESCRIBED)
            ],
            "servers_left_out": max(0, len(self._monitors) - MAX_DESCRIBED),
        }

    def describe_sources(self) -> str:
        """Describes where the servers come from, for a person."""
        return self._sources.describe()

    async def _follow_sources(self) -> None:
        while True:
            await asyncio.sleep(self._config.health_interval_seconds)
            await self._apply_listing(await self._sources.read())

    async def _apply_listing(self, listing: Listing) -> None:
        """Adds new servers, and drains those that are to be drained or are no longer listed.

        A server that is no longer listed is removed once it has no request of this pool. (No request outlasts
        `request_timeout_seconds`.)
        """
        known = {server.url: server for server in self._fleet.servers}
        for url, drain_reason in listing.items():
            server = known.pop(url, None) or self._add(url)
            self._monitors[server].drain(drain_reason)
        for server in known.values():
            self._monitors[server].drain("it is no longer among the servers")
            if not server.in_flight:
                await self._forget(server)

    def _add(self, url: str) -> Server:
        server = self._fleet.add(url)
        client: ServerClient
        if self._config.protocol == "binary":
            client = BinaryClient(url, self._connections, proves=self._sources.is_configured(url))
        else:
            client = OpenAIClient(url, self._connections)
        monitor = self._monitors[server] = ServerMonitor(
            server, client, self._fleet, self._config, self._model, self._on_change, self._claim, self._follows,
            self._outages, self._called,
        )  # fmt: skip
        if self._wanted is not None:
            monitor.set_wanted(self._wanted)
        task = self._tasks[server] = asyncio.create_task(monitor.run(), name=f"monitor of {url}")
        task.add_done_callback(partial(self._monitor_ended, monitor))
        return server

    async def _forget(self, server: Server) -> None:
        self._fleet.forget(server)
        monitor, task = self._monitors.pop(server), self._tasks.pop(server)
        task.cancel()
        await asyncio.wait([task])
        monitor.forget()
        self._on_change()
        logger.info("Inference server %s is removed", server.url)

    async def generate(
        self,
        prompt_ids: Int32Array | Sequence[int],
        sampling: SamplingParameters,
        *,
        affinity: str,
        routed_experts_start: int = 0,
    ) -> Turn:
        """One model call. `prompt_ids` is `[tokens]`; `affinity` names the rollout, whose turns share a server and its prefix.

        The rollouts of a group begin at one server, too (`Fleet.acquire`). Routing is returned from token `routed_experts_start`
        on. Cancelling the call ends it at the server. Raises `RequestRefused` for a request that no server will ever serve, and
        `InferenceError` when the retries or `request_timeout_seconds` are used up.
        """
        request = GenerateRequest(self._model, np.asarray(prompt_ids, dtype=np.int32), sampling, routed_experts_start)
        request.check(self._bounds)

        began = time.perf_counter()
        answer = await self._asked(calls.generate, request, affinity)
        turn = calls.as_turn(request, answer.content, answer.version, answer.monitor.server.url)
        answer.monitor.activity.generated(turn)
        self.meters.turn_seconds.observe(time.perf_counter() - began)
        return turn

    def forget_group(self, affinity: str) -> None:
        """See `Fleet.forget_group`."""
        self._fleet.forget_group(affinity)

    async def score(self, token_ids: Int32Array, start: int, *, affinity: str) -> Float32Array:
        """Returns the log-probability of each token from `start` on, of the model's whole distribution at temperature 1.

        Raises as `generate`.
        """
        request = ScoreRequest(self._model, token_ids, start)
        answer = await self._asked(calls.score, request, affinity)
        return answer.content.log_probabilities

    async def detokenize(self, token_ids: list[int], affinity: str) -> str:
        """Returns the text of token ids by the tokenizer of a server, special tokens included. Raises as `generate`."""
        return (await self._asked(calls.detokenize, token_ids, affinity)).content

    async def _asked(self, call: calls.Call[Asked, Content], request: Asked, affinity: str) -> _Answer[Content]:
        """Makes the request at a server, and after a failure at another one."""
        last: InferenceError | None = None
        limit = self._config.request_timeout_seconds
        due = asyncio.get_running_loop().time() + limit
        try:
            if not self._starts.take():
                await self._wait_to_start()
            avoid: Server | None = None
            for attempt in range(self._config.max_retries + 1):
                if attempt > 1:
                    async with asyncio.timeout_at(due):
                        await asyncio.sleep(RETRY_SECONDS * 2 ** (attempt - 2))
                server = self._free_place(affinity, avoid)
                if server is None:
                    async with asyncio.timeout_at(due):
                        server = await self._place(affinity, avoid)
                version = server.version or 0  # None: the weights that it was started with
                monitor = self._monitors[server]
                try:
                    with monitor.activity.request():
                        answer = await self._answer(monitor, call, request, due)
                    self._fleet.succeeded(server)
                    monitor.served()
                    origin = answer.origin if isinstance(answer, Completion) else None
                    return _Answer(answer, monitor.version_of(origin, version), monitor)
                except (ServerFailure, RequestRefused) as error:
                    level = logging.DEBUG if isinstance(error, RequestRefused) else logging.WARNING
                    logger.log(level, "Request of %s, attempt %d, failed: %s", affinity, attempt + 1, error)
                    last, avoid = error, server
                    async with asyncio.timeout_at(due):
                        await self._note_failure(monitor, error)
                    if isinstance(error, RequestRefused) and server.state is not State.OUT:
                        raise  # the refusal of a server that refuses everything says nothing of the request
                    self.meters.retries += attempt < self._config.max_retries
                finally:
                    self._fleet.release(server)
                    self._serve_waiting()
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
        """Returns what a completion says, read by the parsers of `server` or another one. See `calls.parse`."""
        usable = (State.SERVING, State.LOADING)
        clients = [monitor.client for each, monitor in self._monitors.items() if each.state in usable]
        if not tools and self.parses_reasoning:  # only that is left to be found, and some servers may not parse it
            clients = [client for client in clients if client.reasons]
        return await calls.parse(clients, token_ids, tools, template_kwargs, cut=cut, first=server)

    @property
    def parses_reasoning(self) -> bool:
        """Whether a server said that it has a parser of reasoning, in service or not. A stock server does not say it."""
        return any(monitor.client.reasons for monitor in self._monitors.values())

    async def update_weights(self, update: WeightUpdate, on_loaded: Callable[[], None] | None = None) -> None:
        """Returns when every reachable server holds the weights and has proven it, or is out of service.

        A server that is still busy with it `LATE_SECONDS` after another was done is not waited for, and goes on.
        Requests in flight go on. `on_loaded` is called once new requests may begin at every server that takes the weights: it
        loads them and computes with them what comes, or their digest is right. Answers wait for the whole proof. Raises
        `InferenceError`, with the reasons, if servers were reached and none of them took the weights: no later attempt succeeds
        with a wrong checkpoint or probe; its subclass `WeightsNotSeen` if none of them sees the published directory; `ValueError`
        for an adapter of another name than the pool's requests give, which would not be computed with it.
        """
        if update.adapter not in (None, self._model):
            raise ValueError(
                f"adapter {update.adapter!r} is to be loaded, but the pool's requests name {self._model!r} and would not be "
                f"computed with it: make the pool with the name {update.adapter!r}"
            )
        async with self._updating:
            began = time.perf_counter()
            if self._wanted is None and self._config.protocol == "openai":
                logger.warning(STOCK_SERVERS_PROVE_NOTHING)
            self._wanted = update
            for monitor in self._monitors.values():
                monitor.set_wanted(update)
            await self._until_taken(update, loaded=True)
            if on_loaded is not None and not self._closed and self._fleet.serving:
                on_loaded()
            await self._until_taken(update)
            if self._closed:
                raise InferenceError("the inference pool was closed during a weight update")
            refusals = [monitor.refusal for monitor in self._monitors.values() if monitor.refusal is not None]
            if refusals and not self._fleet.serving:
                kind = WeightsNotSeen if all(isinstance(each, WeightsNotSeen) for each in refusals) else InferenceError
                raise kind(f"no inference server took version {update.version}: {'; '.join(map(str, refusals))}")
            self.meters.update_seconds.observe(time.perf_counter() - began)

    async def _until_taken(self, update: WeightUpdate, loaded: bool = False) -> None:
        """Waits until it is known of each server whether it holds the weights; with `loaded`, or lets requests begin."""
        unknown: list[ServerMonitor] = []

        def is_taken() -> bool:
            unknown[:] = [
                monitor
                for server, monitor in self._monitors.items()
                if not (
                    monitor.concluded is update
                    or (loaded and (monitor.begun is update or monitor.loaded is update))
                    or self._tasks[server].done()
                )
            ]
            return self._closed or not unknown

        await self._until(lambda: is_taken() or any(each.has(update) for each in self._monitors.values()))
        try:
            async with asyncio.timeout(LATE_SECONDS):
                await self._until(is_taken)
        except TimeoutError:
            for monitor in unknown:
                monitor.go_on_without(update)

    async def _note_failure(self, monitor: ServerMonitor, error: InferenceError) -> None:
        server = monitor.server
        if isinstance(error, WrongAnswer):
            monitor.take_out(f"it gave a wrong answer: {error}")
        elif self._fleet.failed(server):
            await monitor.doubt(error)
        elif server.state is State.SERVING:
            monitor.check_now()

    async def _answer(
        self, monitor: ServerMonitor, call: calls.Call[Asked, Content], request: Asked, due: float
    ) -> Content:
        """Returns the answer of one server. An answer that arrives while it loads weights waits for their proof.

        Raises `ServerFailure`, also as soon as the server is taken out, and `TimeoutError` at `due`, on the loop's clock.
        """
        server = monitor.server
        if not server.counted:  # It was taken out, and may load again, since this request got its place.
            raise ServerFailure(f"{server.url} went out of service: {server.reason}")
        # One block for both, which the monitor and the deadlines end: two, or two tasks, would cost each request more.
        block = asyncio.timeout(None)
        try:
            async with block:
                monitor.requests.add(block)
                self._deadlines.watch(block, due)
                answer = await call(monitor.client, request, self._bounds)
                if not monitor.resolved.is_set():
                    await monitor.resolved.wait()
            if block.when() is not None:  # It was ended just as the answer came.
                raise TimeoutError
        except TimeoutError:
            if self._deadlines.has_ended(block):
                raise
            raise ServerFailure(f"{server.url} went out of service: {server.reason}") from None
        finally:
            monitor.requests.discard(block)
            self._deadlines.forget(block)
        if isinstance(answer, Completion | Scores):
            monitor.check_origin(answer.origin)
        return answer

    async def _wait_to_start(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._starts.wait(partial(_end, turn))
        await turn

    def _free_place(self, affinity: str, avoid: Server | None) -> Server | None:
        """Returns a server with a place for the request; None if it must wait, behind those that wait already."""
        if self._closed:
            raise InferenceError("the inference pool is closed")
        return None if self._waiting else self._fleet.acquire(affinity, avoid)

    async def _place(self, affinity: str, avoid: Server | None) -> Server:
        """Returns a server with a place for the request, first come, first served."""
        self._waiting.append(waiter := _Waiter(affinity, avoid))
        self._serve_waiting()
        try:
            return await waiter.place
        except asyncio.CancelledError:
            if waiter.place.done() and not waiter.place.cancelled():
                self._fleet.release(waiter.place.result())
            self._serve_waiting()
            raise

    def _serve_waiting(self) -> None:
        while self._waiting:
            waiter = self._waiting[0]
            if not waiter.place.done():
                server = self._fleet.acquire(waiter.affinity, waiter.avoid)
                if server is None:
                    return
                waiter.place.set_result(server)
            self._waiting.popleft()

    def _on_change(self) -> None:
        self._changed.set()
        self._serve_waiting()
        if self._fleet.capacity != self._capacity:
            self._capacity = self._fleet.capacity
            if self._on_capacity is not None:
                self._on_capacity(self._capacity)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _monitor_ended(self, monitor: ServerMonitor, task: asyncio.Task[None]) -> None:
        self._changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("The monitor of %s failed; this is a defect", monitor.server.url, exc_info=error)
            monitor.take_out(f"its monitor failed: {error!r}")

    def _sources_task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("The servers' sources are followed no more; this is a defect", exc_info=error)

    def _describe(self) -> str:
        if not self._fleet.servers:
            return f"no server is known: {self._sources.describe()}"
        return "; ".join(f"{status.url} is {status.state}: {status.reason or 'busy'}" for status in self.status())


class _Answer(NamedTuple, Generic[Content]):
    """What a server answered."""

    content: Content
    version: int
    """The policy version with which a completion began, as it says itself; else what the server had when it was asked."""
    monitor: ServerMonitor


class _Waiter:
    """A request that waits for a server."""

    def __init__(self, affinity: str, avoid: Server | None) -> None:
        self.affinity, self.avoid = affinity, avoid
        self.place: asyncio.Future[Server] = asyncio.get_running_loop().create_future()


def _end(turn: asyncio.Future[None]) -> None:
    if not turn.done():  # its caller was cancelled
        turn.set_result(None)
