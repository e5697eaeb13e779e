"""A proxy between pool and server that gives answers to the wrong requests: none is taken, and each failure says so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from counterpoint.inference import wire
from counterpoint.inference.base import Completion, GenerateRequest, InferenceError
from tests.inference.pool.test_wrong_answers import SAMPLING, integers, pool_of
from tests.support.fake_inference import FakeServer, make_completion

Mixing = Callable[[bytes], Awaitable[bytes]]
"""Takes the body of an answer, and returns the one that is delivered in its place."""


@asynccontextmanager
async def proxied(url: str, mix: Mixing) -> AsyncIterator[str]:
    """A proxy before the server at `url`; yields its own address. Model calls get the bodies that `mix` returns."""
    async with aiohttp.ClientSession() as session:

        async def forward(request: web.Request) -> web.Response:
            headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
            body = await request.read()
            async with session.request(request.method, f"{url}{request.path_qs}", headers=headers, data=body) as answer:
                found = await answer.read()
                if request.path in (wire.GENERATE_PATH, wire.SCORE_PATH):
                    found = await mix(found)
                return web.Response(body=found, status=answer.status, content_type=answer.content_type)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


class Swapping:
    """Delivers the first answer in place of the second, and the second in place of the first; all later ones as they are."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self._both = asyncio.Event()

    async def __call__(self, body: bytes) -> bytes:
        number = len(self.bodies)
        self.bodies.append(body)
        if number >= 2:
            return body
        if number == 1:
            self._both.set()
        await self._both.wait()
        return self.bodies[1 - number]


class Repeating:
    """Delivers the first answer to every request but `honest` later ones in a row."""

    def __init__(self) -> None:
        self.first: bytes | None = None
        self.repeats = 0

    async def __call__(self, body: bytes) -> bytes:
        if self.first is None:
            self.first = body
        elif self.repeats:
            self.repeats -= 1
            return self.first
        return body


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    """A server whose completion is the prompt again: of any two requests the answers differ, and have one length."""
    server = FakeServer()

    async def complete(asked: GenerateRequest) -> Completion:
        return make_completion(asked, asked.prompt_ids.tolist(), -0.5)

    monkeypatch.setattr(server, "_complete", complete)
    return server


def warned(caplog: pytest.LogCaptureFixture) -> int:
    return sum("is one to another request" in record.message for record in caplog.records)


async def test_two_answers_that_a_proxy_swaps_are_both_refused_and_asked_for_again(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = {"one": integers(7, 8, 9), "two": integers(3, 2, 1)}
    async with server, proxied(server.url, Swapping()) as url, pool_of(url) as pool:
        with caplog.at_level(logging.WARNING):
            turns = await asyncio.gather(
                *(pool.generate(prompt, SAMPLING, affinity=a) for a, prompt in prompts.items())
            )
        for turn, prompt in zip(turns, prompts.values(), strict=True):
            np.testing.assert_array_equal(turn.completion_ids, prompt)
        assert warned(caplog) == 2
        assert pool.meters.retries == 2


async def test_an_answer_that_a_proxy_delivers_again_is_refused(
    server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one to the same prompt: it belongs to another request, and would be trained twice."""
    mix, prompt = Repeating(), integers(7, 8, 9)
    async with server, proxied(server.url, mix) as url, pool_of(url) as pool:
        await pool.generate(prompt, SAMPLING, affinity="a")
        with caplog.at_level(logging.WARNING):
            for number, again in enumerate((integers(3, 2, 1), prompt), 1):
                mix.repeats = 1
                turn = await pool.generate(again, SAMPLING, affinity="a")
                np.testing.assert_array_equal(turn.completion_ids, again)
                assert warned(caplog) == number


async def test_a_proxy_that_never_gives_the_right_answer_fails_the_request_by_that_name(server: FakeServer) -> None:
    mix = Repeating()
    async with server, proxied(server.url, mix) as url, pool_of(url, max_retries=1) as pool:
        await pool.score(integers(7, 8, 9), 1, affinity="a")
        mix.repeats = 99
        with pytest.raises(InferenceError, match="to another request, or to another prompt"):
            await pool.score(integers(7, 8, 9), 1, affinity="a")
