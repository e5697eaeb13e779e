"""An inference server of a few lines with our plugin's routes, whose faults a test turns on and off.

Its "weights" are a version: a completion's tokens are all `version`, and a probe answers `-version - 1` for each token, so
that a test can read off which weights answered. Real sockets, the real wire encoding, no model.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from pathlib import Path
from types import TracebackType

import numpy as np
from aiohttp import web

from inference import wire
from inference.base import Completion, Probe, WeightUpdate

ROUTES = (
    ("POST", wire.GENERATE_PATH),
    ("POST", wire.PROBE_PATH),
    ("POST", wire.UPDATE_PATH),
    ("POST", wire.UNLOAD_PATH),
    ("GET", wire.STATUS_PATH),
    ("GET", "/metrics"),
)


def weight_update(version: int, adapter: str | None = None) -> WeightUpdate:
    """An update whose probe a healthy fake server passes."""
    probe = Probe(version, [1, 2, 3], [-version - 1.0] * 2, digests={"float32": digest_of(version)})
    return WeightUpdate(version, Path("nowhere"), probe, adapter)


def digest_of(version: int) -> dict[str, str]:
    """Of a fake server's weights, in two layers, one of which never changes."""
    return {"": "0" * 16, "0": f"{version:016x}"}


class FakeServer:
    """Serves on a free port of loopback while it is entered."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.version = 0
        """Of what it computes."""
        self.held = 0
        """Of the weights it says it computes with."""
        self.instance = "first"
        self.healthy = True
        self.answers: Counter[str] = Counter()
        """Requests seen, by path."""
        self.arrived = asyncio.Event()
        """A model call has arrived."""
        self.aborted = asyncio.Event()
        """A model call was cut off by its client."""
        self.gate = asyncio.Event()
        """Model calls wait for it; open unless a test closes it."""
        self.gate.set()
        self.load_gate = asyncio.Event()
        self.load_gate.set()
        self.probe_gate = asyncio.Event()
        self.probe_gate.set()
        self.generate_status = 200
        self.drop_next = 0
        """Model calls whose connection is cut instead of answered."""
        self.load_status = 200
        self.deaf = False
        """Updates answer 200 and change nothing: what a real vLLM was seen to do."""
        self.old_kernels = False
        """Updates change the weights, by their digest, and not what is computed."""
        self.nan = False
        self.draining = False
        self.metrics: str | None = None
        """What it tells of its load; None: nothing."""
        self.unloaded: list[str] = []
        self.unload_gate = asyncio.Event()
        self.unload_gate.set()
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

    async def listen(self, port: int) -> None:
        """Starts to serve on `port`; 0 takes a free one."""
        app = web.Application()
        app.add_routes([web.route(method, path, self._handle) for method, path in ROUTES])
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=self._tls).start()
        self.port = int(self._runner.addresses[0][1])
        self.url = f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    async def vanish(self) -> None:
        """Stops listening and cuts every connection, as a killed process does."""
        await self._runner.cleanup()

    async def restart(self) -> None:
        """Comes back on the same port with the weights it was started with."""
        self.version, self.held, self.instance = 0, 0, self.instance + "'"
        await self.listen(self.port)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.answers[request.path] += 1
        if request.path == wire.STATUS_PATH:
            status = {"instance": self.instance, "draining": self.draining}
            return web.json_response(status, status=200 if self.healthy else 503)
        if request.path == "/metrics":
            return web.Response(text=self.metrics or "", status=200 if self.metrics else 404)
        if request.path == wire.GENERATE_PATH:
            return await self._generate(request)
        fields = await request.json()
        if request.path == wire.UPDATE_PATH:
            await self.load_gate.wait()
            if self.load_status == 200 and not self.deaf:
                self.held = fields["version"]
                if not self.old_kernels:
                    self.version = self.held
            if self.load_status != 200:
                return web.json_response({"error": "these are not weights"}, status=self.load_status)
            return web.json_response({"held": {"dtype": "float32", "layers": digest_of(self.held)}})
        if request.path == wire.UNLOAD_PATH:
            await self.unload_gate.wait()
            self.unloaded.append(fields["adapter"])
            return web.json_response({"unloaded": True})
        await self.probe_gate.wait()
        return web.json_response({"log_probabilities": [-self.version - 1.0] * (len(fields["token_ids"]) - 1)})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = wire.decode_request(await request.read())
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
        if self.generate_status != 200:
            return web.json_response({"error": "so it was told"}, status=self.generate_status)
        tokens = asked.sampling.max_tokens
        completion = Completion(
            token_ids=np.full(tokens, self.version, dtype=np.int32),
            log_probabilities=np.full(tokens, np.nan if self.nan else -0.5, dtype=np.float32),
            finish_reason="length",
            routed_experts=np.zeros(
                (len(asked.prompt_ids) + tokens - 1 - asked.routed_experts_start, 2, 2), dtype=np.uint8
            ),
        )
        return web.Response(body=wire.encode_completion(completion))
