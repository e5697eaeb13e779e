"""A server that speaks our binary routes without a model: completions are noise, routing is a function of the position.

It runs in a thread with a loop of its own, so that the daemon under test has its loop to itself.
"""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from types import TracebackType

import numpy as np
import orjson
from aiohttp import web

from inference import wire
from inference.base import Completion, GenerateRequest, Probe

LAYERS, TOP_K = 2, 2


class FakeInference:
    """A context manager. `delay_seconds` is how long each completion takes."""

    def __init__(self, delay_seconds: float = 0.002, vocabulary: int = 100) -> None:
        self.delay_seconds = delay_seconds
        self.vocabulary = vocabulary
        self.versions: list[int] = []
        """Loaded, in order."""
        self.completions = 0
        self.fail_every = 0
        """Each so many requests one gets status 500; 0: none."""
        self.asked: list[GenerateRequest] = []
        self._probe: Probe | None = None
        self._random = random.Random(0)

    def __enter__(self) -> FakeInference:
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="fake-inference")
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def _run(self, started: threading.Event) -> None:
        asyncio.run(self._serve(started))

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        application = web.Application()
        application.add_routes(
            [
                web.get(wire.STATUS_PATH, self._status),
                web.post(wire.UPDATE_PATH, self._update),
                web.post(wire.PROBE_PATH, self._answer_probe),
                web.post(wire.GENERATE_PATH, self._generate),
            ]
        )
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._port = runner.addresses[0][1]
        started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response({"instance": "fake"})

    async def _update(self, request: web.Request) -> web.Response:
        fields = orjson.loads(await request.read())
        self._probe = Probe.read(Path(fields["directory"]) / "probe.json")
        self.versions.append(fields["version"])
        return web.json_response({"held": {"dtype": "float32", "layers": {}}})

    async def _answer_probe(self, request: web.Request) -> web.Response:
        assert self._probe is not None
        return web.json_response({"log_probabilities": self._probe.log_probabilities})

    async def _generate(self, request: web.Request) -> web.Response:
        asked = wire.decode_request(await request.read())
        self.asked.append(asked)
        fails = self.fail_every and len(self.asked) % self.fail_every == 0
        await asyncio.sleep(self.delay_seconds)
        if fails:
            return web.Response(status=500, text="out of memory")
        count = self._random.randint(1, min(8, asked.sampling.max_tokens))
        tokens = np.asarray([self._random.randrange(3, self.vocabulary) for _ in range(count)], dtype=np.int32)
        rows = np.arange(asked.routed_experts_start, len(asked.prompt_ids) + count - 1)
        experts = np.broadcast_to((rows % 251).astype(np.uint8)[:, None, None], (len(rows), LAYERS, TOP_K))
        self.completions += 1
        completion = Completion(tokens, np.full(count, -1.0, dtype=np.float32), "length", np.ascontiguousarray(experts))
        return web.Response(body=wire.encode_completion(completion))
