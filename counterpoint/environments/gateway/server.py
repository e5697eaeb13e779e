"""The gateway's HTTP server: an endpoint of OpenAI's and Anthropic's APIs for each rollout, with a URL and a key of its own.

    gateway = Gateway()                                # in the environment's `start`, or its constructor
    async with gateway.session(model) as session:      # in its `rollout`
        ...                                            # an agent uses session.base_url or anthropic_url, and api_key
    session.turns, session.last_reply, session.errors  # what it asked and got
    await gateway.close()                              # in the environment's `close`

It listens on a free port of loopback, on the event loop of the first session, and starts with it. Every call of an agent is a
call of `model`, so its turns are the rollout's. The end of a session's block ends its requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import traceback
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from counterpoint.environments.base import Model
from counterpoint.environments.gateway.anthropic_answer import anthropic_error, anthropic_events
from counterpoint.environments.gateway.errors import GatewayRefused
from counterpoint.environments.gateway.json_body import parse_body
from counterpoint.environments.gateway.requests import Asked
from counterpoint.environments.gateway.responses import MODEL, events
from counterpoint.environments.gateway.responses_answer import responses_events
from counterpoint.environments.gateway.session import Limits, RewardRefused, Session
from counterpoint.transport.exact_json import dumps
from counterpoint.transport.http.connections import BoundedConnections
from counterpoint.transport.http.requests import bearer_token, refused_coding
from counterpoint.transport.process.descriptors import MOST_DESCRIPTORS, raise_descriptor_limit
from counterpoint.transport.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)

# aiohttp writes a traceback for every malformed head: a log that an agent could fill. Faults of ours are logged in `_answered`.
_http_logger = logging.getLogger(f"{__name__}.http")
_http_logger.setLevel(logging.CRITICAL)

HOST = "127.0.0.1"
HEAD_SECONDS = 75.0
"""Longest time until the next request's head is complete; then the connection is closed."""
RETRY_SECONDS = "1"
"""What a client that is refused for the number of its requests is told to wait."""
BODY_SECONDS = 60.0
"""Longest time until a request's body has arrived."""
MOST_CONNECTIONS = 8192
"""Most connections, and no more than half of the descriptors that the process may have. Each rollout has a share."""
_KEPT_ENDED = 4096
"""Ended sessions whose agents are told so. Those before are unknown."""


class Gateway:
    """Serves the sessions of one owner, who closes it."""

    def __init__(
        self, limits: Limits | None = None, *, agent_sampling: bool = False, turn_rewards: bool = False
    ) -> None:
        """Uses an agent's temperature, top_p, top_k and min_p with `agent_sampling`, and ignores them without it.

        With `turn_rewards` an agent may give its turns rewards, and so may whatever it runs.
        """
        self._limits = limits or Limits()
        self._agent_sampling = agent_sampling
        self._turn_rewards = turn_rewards
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        """The sessions, by the digest of their ids, so that the time of a look-up tells nothing about an id."""
        self._ended: OrderedDict[bytes, bytes] = OrderedDict()
        """Digests of the keys of ended sessions."""
        self._nobodys = secrets.token_bytes(32)
        """What a key is compared with where the id is unknown."""
        self._connections: BoundedConnections | None = None
        self._log = RateLimitedLog(logger)
        self._starting = asyncio.Lock()
        self._runner: web.ServerRunner | None = None
        self._server: asyncio.Server | None = None
        self._url = ""

    @asynccontextmanager
    async def session(self, model: Model) -> AsyncIterator[Session]:
        """An endpoint whose requests are calls of `model`, during the block.

        Raises `RewardRefused` at the block's end if the agent sent a reward that could not be taken.
        """
        await self._start()
        identity, key = secrets.token_urlsafe(18), f"cp-{secrets.token_urlsafe(24)}"
        session = Session(
            model,
            f"{self._url}/{identity}/v1",
            key,
            self._limits,
            agent_sampling=self._agent_sampling,
            turn_rewards=self._turn_rewards,
        )
        place = _digest(identity)
        self._sessions[place] = session
        try:
            yield session
            if session.refused_reward:
                raise RewardRefused(f"the agent sent a reward that cannot be taken: {session.refused_reward}")
        finally:
            del self._sessions[place]
            self._ended[place] = _digest(key)
            if len(self._ended) > _KEPT_ENDED:
                self._ended.popitem(last=False)
            await session.end()

    async def close(self) -> None:
        """Stops serving and closes every connection."""
        server, self._server = self._server, None
        runner, self._runner = self._runner, None
        if server is not None:
            server.close()
        if runner is not None:
            await runner.cleanup()
        if server is not None:
            await server.wait_closed()

    async def _start(self) -> None:
        async with self._starting:
            if self._server is not None:
                return
            handler = web.Server(
                self._answered,
                handler_cancellation=True,
                keepalive_timeout=HEAD_SECONDS,
                lingering_time=5.0,
                auto_decompress=False,  # it would be done before a key is looked at
                access_log=None,
                logger=_http_logger,
            )
            self._runner = web.ServerRunner(handler, shutdown_timeout=1.0)
            await self._runner.setup()
            loop = asyncio.get_running_loop()

            most = min(MOST_CONNECTIONS, raise_descriptor_limit(MOST_DESCRIPTORS) // 2)
            self._connections = BoundedConnections(handler, most)
            self._server = await loop.create_server(self._connections.connect, HOST, 0, backlog=1024)
            port = self._server.sockets[0].getsockname()[1]
            self._url = f"http://{HOST}:{port}"
            logger.info("the gateway for agents listens on %s", self._url)

    async def _answered(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._answer(request)
        except GatewayRefused as refusal:
            return refused(request, refusal)
        except ConnectionError:
            raise  # the client has gone while it was answered
        except Exception as error:  # noqa: BLE001 - a fault of ours costs one request
            self._log.note(logging.ERROR, f"the gateway failed to answer a request:\n{traceback.format_exc()}")
            return refused(request, GatewayRefused(f"the gateway failed: {type(error).__name__}", status=500))

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        identity, _, path = request.path.removeprefix("/").partition("/")
        key = bearer_token(request.headers.get("Authorization")) or request.headers.get("X-Api-Key", "")
        session = self._authorized(identity, key)
        if self._connections is not None and not self._connections.prove(request.protocol, identity):
            raise GatewayRefused("the rollout has its share of connections; close some, or use them again", status=429)
        served = {"id": MODEL, "object": "model", "created": 0, "owned_by": "counterpoint"}
        if request.method == "GET" and path == "v1/models":
            return web.json_response({"object": "list", "data": [served]})
        if request.method == "GET" and path == f"v1/models/{MODEL}":
            return web.json_response(served)
        if path not in PATHS and path != _REWARD:
            raise GatewayRefused(f"there is no {request.method} /{path[:80]} here", status=404)
        if request.method != "POST":
            raise GatewayRefused(f"{request.method} is not allowed here; POST is", status=405)
        async with session.admitted():
            content = await body_of(request, session.limits.body_bytes)
            if path == _REWARD:
                return web.json_response(session.reward(content))
            answer, asked = await answer_to(session, path, parse_body(content))
        return await sent(request, path, answer, asked)

    def _authorized(self, identity: str, key: str) -> Session:
        """The session of that id, if the key is its own. Raises `GatewayRefused`; it takes as long for every wrong id or key."""
        place = _digest(identity)
        session, ended = self._sessions.get(place), self._ended.get(place)
        expected = _digest(session.api_key) if session else ended or self._nobodys
        if not hmac.compare_digest(_digest(key), expected):
            raise GatewayRefused(
                "this URL and key are not those of a rollout in progress", status=401, code="invalid_api_key"
            )
        if session is None or session.has_ended:
            raise GatewayRefused("the rollout has ended", status=410, code="rollout_ended")
        return session


_REWARD = "v1/reward"
_MESSAGES = "v1/messages"
_COUNT = f"{_MESSAGES}/count_tokens"
_RESPONSES = "v1/responses"
_PATHS: dict[str, Callable[[Session, dict[str, Any]], Awaitable[tuple[dict[str, Any], Asked]]]] = {
    "v1/chat/completions": Session.chat,
    "v1/completions": Session.complete,
    _RESPONSES: Session.respond,
    _MESSAGES: Session.message,
}


PATHS = frozenset({*_PATHS, _COUNT})
"""The paths that are served."""


async def answer_to(session: Session, path: str, fields: dict[str, Any]) -> tuple[dict[str, Any], Asked | None]:
    """Returns the answer to a request with these fields at one of `PATHS`, and what was asked. Raises `GatewayRefused`."""
    if path == _COUNT:
        return await session.count_tokens(fields), None
    return await _PATHS[path](session, fields)


async def sent(request: web.BaseRequest, path: str, answer: dict[str, Any], asked: Asked | None) -> web.StreamResponse:
    """Sends an answer, as events where a stream was asked for."""
    if asked is None or not asked.stream:
        # Python's own writer holds the loop for seven times as long; with log-probabilities it may be 20 MB.
        return web.Response(body=dumps(answer), content_type="application/json", charset="utf-8")
    return await _stream(request, _events(path, answer, asked))


def _events(path: str, answer: dict[str, Any], asked: Asked) -> Iterator[bytes]:
    if path == _MESSAGES:
        return anthropic_events(answer)
    return responses_events(answer) if path == _RESPONSES else events(answer, include_usage=asked.include_usage)


def refused(request: web.BaseRequest, refusal: GatewayRefused) -> web.Response:
    """Returns a refusal, in the shape of the API that was asked."""
    is_anthropic = f"{request.path}/".partition("/v1/")[2].startswith("messages/")
    body, is_short = anthropic_error(refusal) if is_anthropic else refusal.body(), refusal.code != "insufficient_quota"
    headers = {"Retry-After": RETRY_SECONDS} if refusal.status == 429 and is_short else None
    response = web.json_response(body, status=refusal.status, headers=headers)
    if not request.content.at_eof():
        response.force_close()  # what is left of the body is not read, so the connection cannot be used again
    return response


async def body_of(request: web.BaseRequest, most_bytes: int) -> bytes:
    """The request's body, if it is plain and no longer than that. Raises `GatewayRefused`."""
    if (why := refused_coding(request.headers.items())) is not None:
        raise GatewayRefused(why, status=415)
    too_long = GatewayRefused(f"the body has more than {most_bytes} bytes", status=413)
    if (request.content_length or 0) > most_bytes:
        raise too_long
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    received = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.content.iter_any():
                received += chunk
                if len(received) > most_bytes:
                    raise too_long
    except TimeoutError:
        raise GatewayRefused(f"the body did not arrive within {BODY_SECONDS:g} s", status=408) from None
    return bytes(received)


async def _stream(request: web.BaseRequest, made: Iterator[bytes]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for event in made:
        await response.write(event)
    await response.write_eof()
    return response


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()
