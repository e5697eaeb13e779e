"""An inference server without a model that has our plugin's routes, and faults that a test turns on and off.

Its "weights" are a version: a completion's tokens are all `version`, and a probe answers `-version - 1` for each token, so
that a test can read off which weights answered. Sockets and wire encoding are real. `FakeServer` runs on the test's own loop;
`FakeInference` runs in a thread, beside a daemon under test, and generates noise.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgpack
import numpy as np
import orjson
from aiohttp import web

from counterpoint.inference import identity, wire
from counterpoint.inference.base import Completion, GenerateRequest, Probe, ScoreRequest, Scores, WeightUpdate
from counterpoint.inference.loads import Load, LoadClaim, Loads, NotOwner, Origin
from counterpoint.inference.sent_weights import LENGTH_BYTES, OFFER_PATH, SEND_PATH, WeightOffer

LAYERS, TOP_K = 2, 2
"""The shape of every completion's routing."""

ROUTES = (
    ("POST", wire.GENERATE_PATH),
    ("POST", wire.SCORE_PATH),
    ("POST", wire.PROBE_PATH),
    ("POST", "/detokenize"),
    ("POST", wire.PARSE_PATH),
    ("POST", wire.UPDATE_PATH),
    ("POST", OFFER_PATH),
    ("POST", SEND_PATH),
    ("POST", wire.UNLOAD_PATH),
    ("POST", wire.CUT_PATH),
    ("GET", identity.STATUS_PATH),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
)


PROBE_TOKENS = [1, 2, 3]

CLAIM = LoadClaim("a test's", "a test", takes_over=True)
"""The claim on what a test loads without a pool."""


def probe_answer(version: int, token_ids: list[int]) -> list[float]:
    """The log-probabilities that a fake server with the weights of `version` answers to a probe: one a token, less the first."""
    return [-version - 1.0] * (len(token_ids) - 1)


def weight_update(version: int, adapter: str | None = None) -> WeightUpdate:
    """An update whose probe a healthy fake server passes."""
    probe = Probe(version, PROBE_TOKENS, probe_answer(version, PROBE_TOKENS), digests={"float32": digest_of(version)})
    return WeightUpdate(version, Path("nowhere"), probe, adapter)


def with_sampling(request: GenerateRequest, fields: dict[str, Any]) -> bytes:
    """The body of a request with these sampling parameters in place of its own, whatever they are."""
    packed: bytes = msgpack.packb(fields)
    return wire.encode_request(request).removesuffix(request.sampling.packed) + packed


def digest_of(version: int) -> dict[str, str]:
    """The digests of a fake server's weights, by layer: two, one of which never changes."""
    return {"": "0" * 16, "0": f"{version:016x}"}


class FakeServer:
    """Serves on a free port of loopback while it is entered."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.version = 0
        """The version that completions are computed with, and probes of what is no adapter."""
        self.adapters: dict[str, int] = {}
        """The versions that probes of adapters are computed with: two pools may load one of each at the same time."""
        self.held = 0
        """The version whose digests it reports."""
        self.secret: bytes | None = None
        """The secret of the job that it belongs to."""
        self.loads = Loads("first")
        """What was loaded under each name, and whose it is."""
        self.tokens: tuple[str, ...] = ()
        """Those that it takes; none: it asks for no token."""
        self.given: set[str | None] = set()
        """The `Authorization` of all requests."""
        self.healthy = True
        self.answers: Counter[str] = Counter()
        """The number of requests, by path."""
        self.asked: list[GenerateRequest] = []
        """The model calls, in order of their arrival."""
        self.versions: list[int] = []
        """The versions of all updates, in order."""
        self.completions = 0
        """The number of model calls that were answered."""
        self.arrived = asyncio.Event()
        """A model call has arrived."""
        self.aborted = asyncio.Event()
        """A model call was cut off by its client."""
        self.gate = asyncio.Event()
        """Model calls wait for it; open unless a test closes it."""
        self.gate.set()
        self.load_gate = asyncio.Event()
        self.load_gate.set()
        self.rest_of_load: asyncio.Event | None = None
        """What the answer to an update waits for after it has begun; None: it begins at its end."""
        self.begins_too_early = False
        """Whether requests that come once it has begun are computed with older weights all the same."""
        self.probe_gate = asyncio.Event()
        self.probe_gate.set()
        self.generate_status = 200
        self.fail_every = 0
        """One of so many model calls is answered with 500; 0: none."""
        self.drop_next = 0
        """Model calls whose connection is cut instead of answered."""
        self.load_status = 200
        self.deaf = False
        """Updates answer 200 and change nothing, as was seen of a real vLLM."""
        self.old_kernels = False
        """Updates change `held`, and not `version`."""
        self.nan = False
        self.draining = False
        self.metrics: str | None = None
        """The body of `/metrics`; None answers 404."""
        self.models: list[str] | None = None
        """The names of `/v1/models`; None answers 404."""
        self.reasons = False
        """Whether it says that it parses reasoning."""
        self.parsed: dict[str, Any] = {"content": "text", "reasoning": "", "calls": [], "malformed": ""}
        """The answer to every parse; with `error`, it is refused."""
        self.scored: list[ScoreRequest] = []
        """The requests for log-probabilities of given tokens, each answered with -token / 100."""
        self.score_status: Callable[[ScoreRequest], int] = lambda _asked: 200
        self.texts: Callable[[list[int]], str] = lambda ids: "".join(map(chr, ids))
        """The server's tokenizer."""
        self.unloaded: list[str] = []
        self.cuts: set[str] = set()
        """The model calls that were cut short; the first opens the gate."""
        self.unload_gate = asyncio.Event()
        self.unload_gate.set()
        self.sent = b""
        """The bytes of the weights that were sent to it last."""
        self.running = 0
        self.most_running = 0
        self._runner: web.AppRunner
        self.url = ""

    async def __aenter__(self) -> FakeServer:
        await self.listen(0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.vanish()

    async def listen(self, port: int, at: socket.socket | None = None) -> None:
        """Starts to serve on `port`; 0 takes a free one. `at` is a listening socket to use instead, of whatever host."""
        app = web.Application()
        app.add_routes([web.route(method, path, self._handle) for method, path in ROUTES])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=self._tls)
        await (site if at is None else web.SockSite(self._runner, at, ssl_context=self._tls)).start()
        self.port = int(self._runner.addresses[0][1])
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    async def vanish(self) -> None:
        """Stops listening and cuts every connection, as a killed process does."""
        await self._runner.cleanup()

    async def cut(self) -> None:
        """Cuts every connection, and goes on to serve on the same port."""
        await self.vanish()
        await self.listen(self.port)

    async def restart(self) -> None:
        """Comes back on the same port with the weights it was started with."""
        self.begin_anew()
        await self.listen(self.port)

    def begin_anew(self) -> None:
        """Becomes another process, with the weights it was started with."""
        self.version, self.held, self.loads = 0, 0, Loads(self.loads.instance + "'")
        self.adapters.clear()

    def described(self, name: str | None) -> dict[str, Any]:
        """The load of a name as `status` has it."""
        return self.loads.described(name)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.answers[request.path] += 1
        self.given.add(given := request.headers.get("Authorization"))
        if self.tokens and given not in [f"Bearer {each}" for each in self.tokens]:
            return web.json_response({"error": "a valid bearer token is required"}, status=401)
        if request.path == identity.STATUS_PATH:
            adapters = {name: self.described(name) for name in self.adapters}
            status = {"instance": self.loads.instance, "draining": self.draining, "reasons": self.reasons}
            if self.secret is not None:
                status["proof"] = identity.proof(
                    self.secret, self.loads.instance, request.headers.get(wire.NONCE_HEADER, "")
                )
            status |= {"weights": self.described(None), "adapters": adapters}
            return web.json_response(status, status=200 if self.healthy else 503)
        if request.path == "/metrics":
            return web.Response(text=self.metrics or "", status=200 if self.metrics else 404)
        if request.path == "/v1/models":
            listed = [{"id": name} for name in self.models or ()]
            return web.json_response({"data": listed}, status=404 if self.models is None else 200)
        if request.path == wire.GENERATE_PATH:
            return await self._generate(request)
        if request.path == wire.SCORE_PATH:
            return await self._score(request)
        if request.path == SEND_PATH:
            offer = await self._receive(request)
            return await self._load(request, offer.version, offer.adapter, offer.claim)
        fields = await request.json()
        if request.path == OFFER_PATH:
            return web.json_response({"holds": []})
        if request.path == "/detokenize":
            return web.json_response({"prompt": self.texts(fields["tokens"])})
        if request.path == wire.PARSE_PATH:
            return web.json_response(self.parsed, status=200 if "error" not in self.parsed else 400)
        if request.path == wire.UPDATE_PATH:
            return await self._load(request, fields["version"], fields["adapter"], LoadClaim.decode(fields["claim"]))
        if request.path == wire.CUT_PATH:
            self.cuts.add(fields["request_id"])
            self.gate.set()
            return web.json_response({"cut": True})
        if request.path == wire.UNLOAD_PATH:
            await self.unload_gate.wait()
            try:
                self.unload(fields["adapter"], LoadClaim.decode(fields["claim"]))
            except NotOwner as error:
                return web.json_response({"error": str(error)}, status=422)
            return web.json_response({"unloaded": True})
        await self.probe_gate.wait()
        version = self.adapters.get(fields["model"], self.version)
        weights = self._origin(fields["model"]).encode()
        return web.json_response({"log_probabilities": probe_answer(version, fields["token_ids"]), "weights": weights})

    def _name(self, model: str) -> str | None:
        return model if model in self.adapters else None

    def _origin(self, model: str, first: Load | None = None) -> Origin:
        name = self._name(model)
        return self.loads.origin(name, self.loads.now(name) if first is None else first)

    def unload(self, adapter: str | None, claim: LoadClaim) -> None:
        """Unloads an adapter, or gives the full weights up."""
        self.loads.release(adapter, claim)
        if adapter is not None:
            self.unloaded.append(adapter)
            if self.adapters.pop(adapter, None) is not None:
                self.loads.changed(adapter)

    async def _load(
        self, request: web.Request, version: int, adapter: str | None, claim: LoadClaim
    ) -> web.StreamResponse:
        await self.load_gate.wait()
        try:
            load = self.loads.next(adapter, version, claim)
        except NotOwner as error:
            return web.json_response({"error": str(error)}, status=422)
        if self.load_status == 200 and not self.begins_too_early:
            self.loads.complete(adapter, load, claim)
        if self.load_status == 200 and not self.deaf:
            self.held = version
            self.versions.append(self.held)
            if not self.old_kernels:
                if adapter is not None:
                    self.adapters[adapter] = version
                else:
                    self.version = self.held
        if self.load_status != 200:
            return web.json_response({"error": "these are not weights"}, status=self.load_status)
        held = {"dtype": "float32", "layers": digest_of(self.held), "load": load.number}
        if self.rest_of_load is None:
            return web.json_response({"held": held})
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        await self.rest_of_load.wait()
        if self.begins_too_early:
            self.loads.complete(adapter, load, claim)
        await answer.write(orjson.dumps({"held": held}))
        await answer.write_eof()
        return answer

    async def _receive(self, request: web.Request) -> WeightOffer:
        length = int.from_bytes(await request.content.readexactly(LENGTH_BYTES), "little")
        offer = WeightOffer.decode(await request.content.readexactly(length))
        self.sent = await request.content.read()
        assert len(self.sent) == offer.nbytes
        return offer

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = wire.decode_request(await request.read())
        self.asked.append(asked)
        number = len(self.asked)
        first = self.loads.now(self._name(asked.model))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.arrived.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.aborted.set()
            raise
        finally:
            self.running -= 1
        if self.drop_next:
            self.drop_next -= 1
            assert request.transport is not None
            request.transport.abort()
        if self.fail_every and number % self.fail_every == 0:
            return web.Response(status=500, text="out of memory")
        if self.generate_status != 200:
            return web.json_response({"error": "so it was told"}, status=self.generate_status)
        self.completions += 1
        completion = await self._complete(asked)
        completion = replace(completion, origin=self._origin(asked.model, first), echo=asked.echo)
        return web.Response(body=wire.encode_completion(completion))

    async def _score(self, request: web.Request) -> web.StreamResponse:
        asked = wire.decode_score_request(await request.read())
        self.scored.append(asked)
        if (status := self.score_status(asked)) != 200:
            return web.json_response({"error": "so it was told"}, status=status)
        values = asked.token_ids[asked.start :].astype(np.float32) / np.float32(-100)
        return web.Response(body=wire.encode_scores(Scores(values, self._origin(asked.model), asked.echo)))

    async def _complete(self, asked: GenerateRequest) -> Completion:
        version = self.adapters.get(asked.model, self.version)
        return make_completion(asked, [version] * asked.sampling.max_tokens, np.nan if self.nan else -0.5)


class FakeInference(FakeServer):
    """A fake server in a thread with a loop of its own while it is entered. Each completion takes `delay_seconds` and has one to
    eight random tokens below `vocabulary`."""

    def __init__(self, delay_seconds: float = 0.002, vocabulary: int = 100) -> None:
        super().__init__()
        self._delay_seconds = delay_seconds
        self._vocabulary = vocabulary
        self._random = random.Random(0)

    def __enter__(self) -> Self:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), name="fake-inference")
        self._thread.start()
        assert started.wait(60), "the fake server does not start"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        assert not self._thread.is_alive(), "the fake server does not end"

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with self:
            started.set()
            await self._stop.wait()

    async def _complete(self, asked: GenerateRequest) -> Completion:
        await asyncio.sleep(self._delay_seconds)
        count = self._random.randint(1, min(8, asked.sampling.max_tokens))
        return make_completion(asked, [self._random.randrange(3, self._vocabulary) for _ in range(count)], -1.0)


def make_completion(asked: GenerateRequest, token_ids: list[int], log_probability: float) -> Completion:
    """A completion of these tokens, with the routing that the request lacks: row r is all r % 251."""
    rows = np.arange(asked.routed_experts_start, len(asked.prompt_ids) + len(token_ids) - 1)
    experts = np.broadcast_to((rows % 251).astype(np.uint8)[:, None, None], (len(rows), LAYERS, TOP_K))
    return Completion(
        token_ids=np.array(token_ids, dtype=np.int32),
        log_probabilities=np.full(len(token_ids), log_probability, dtype=np.float32),
        finish_reason="length",
        routed_experts=np.ascontiguousarray(experts),
    )
