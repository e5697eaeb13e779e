"""An OpenAI-compatible server on loopback that answers from a script, faults included."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

Behaviour = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


class FakeJudge:
    """Plays `script` in order; its last entry is repeated."""

    def __init__(self, *script: Behaviour) -> None:
        self.script = list(script)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.most_at_once = 0
        self.now = 0
        self.release = asyncio.Event()
        self.url = ""

    async def __aenter__(self) -> FakeJudge:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release.set()
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        self.now += 1
        self.most_at_once = max(self.most_at_once, self.now)
        try:
            behaviour = self.script.pop(0) if len(self.script) > 1 else self.script[0]
            return await behaviour(request, body)
        finally:
            self.now -= 1


def completion(text: Any, usage: Any = None, finish_reason: str = "stop") -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return orjson.dumps({"choices": [choice], "usage": usage, "model": "m-2026", "system_fingerprint": "fp_7"})


def says(text: Any, usage: Any = None, finish_reason: str = "stop") -> Behaviour:
    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=completion(text, usage, finish_reason), content_type="application/json")

    return behave


def status(code: int, text: str = "", **headers: str) -> Behaviour:
    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(
            status=code, text=text, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )

    return behave


def raw(content: bytes, **headers: str) -> Behaviour:
    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=content, headers={name.replace("_", "-"): value for name, value in headers.items()})

    return behave


def zipped(text: str) -> Behaviour:
    return raw(gzip.compress(completion(text)), Content_Encoding="gzip")


async def hangs(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def drops(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def floods(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Writes without an end."""
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"x" * 65536)


async def echoes_the_key(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.Response(status=400, text=f"bad request of {request.headers['Authorization']}")
