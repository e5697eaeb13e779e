"""The endpoints of the SDK's protocol, in one table, and how answers and errors look.

Work is never done within a request: a request is taken, and its result fetched by a long poll, as the SDK does.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import orjson
from aiohttp import web
from google.protobuf.message import DecodeError

from counterpoint.inference.base import InferenceError
from counterpoint.service.keys import digest
from counterpoint.service.tinker.datums import BadRequest
from counterpoint.service.tinker.futures import TooMany
from counterpoint.service.tinker.proto import MESSAGES
from counterpoint.service.tinker.sampling import Sample
from counterpoint.service.tinker.sequence import TooEarly
from counterpoint.service.tinker.service import (
    NO_UNEMBEDDING,
    CreateModel,
    CreateSampler,
    Gone,
    LoadWeights,
    NotFound,
    Service,
)
from counterpoint.transport.http.listening import PROVEN, Proven
from counterpoint.transport.http.requests import refused_coding

logger = logging.getLogger(__name__)

ROOT = "/api/v1"

MAX_BODY_BYTES = 64 * 2**20

POLL_SECONDS = 35.0
"""How long a poll waits for a result. The SDK waits 45 s."""

PROTOBUF = "application/x-protobuf"

Body = TypeVar("Body", bound=msgspec.Struct)

Handler = Callable[["Endpoints", web.Request, str], Awaitable[web.Response]]


class _ModelBody(msgspec.Struct, frozen=True):
    model_id: str
    seq_id: int | None = None


class _SessionBody(msgspec.Struct, frozen=True):
    session_id: str


class _FutureBody(msgspec.Struct, frozen=True):
    request_id: str


class _PathBody(msgspec.Struct, frozen=True):
    tinker_path: str


class Endpoints:
    """The endpoints, over one service."""

    def __init__(self, service: Service, keys: frozenset[bytes]) -> None:
        """`keys` are the digests of those that are taken; without any, every request is."""
        self._service = service
        self._keys = keys

    def app(self) -> web.Application:
        """Returns the application, with every endpoint."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app[PROVEN] = Proven()
        for method, path, handler in ENDPOINTS:
            app.router.add_route(method, ROOT + path, self._guarded(handler))
        return app

    def _guarded(self, handler: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            owner = self._owner(request)
            if owner is None:
                return _error(401, "the key is none of those that are taken; set TINKER_API_KEY")
            request.app[PROVEN].note(request)
            if (refusal := refused_coding(request.headers.items())) is not None:
                return _error(415, refusal)
            try:
                return await handler(self, request, owner)
            except NotFound as error:
                return _error(404, str(error))
            except Gone as error:
                return _error(410, str(error))
            except (TooMany, TooEarly) as error:
                return _error(429, str(error))
            except (BadRequest, msgspec.MsgspecError, DecodeError, ValueError, RecursionError) as error:
                return _error(422, str(error))
            except InferenceError as error:
                return _error(503, str(error))

        return handle

    def _owner(self, request: web.Request) -> str | None:
        """Returns the owner that a request's key stands for, empty where there are no keys; None for a wrong key."""
        if not self._keys:
            return ""
        given = digest(request.headers.get("X-API-Key", ""))
        known = [key for key in self._keys if hmac.compare_digest(key, given)]
        return known[0].hex() if known else None

    # --- the client, the server and sessions ---

    async def _health(self, request: web.Request, owner: str) -> web.Response:
        return _json(status="ok")

    async def _client_config(self, request: web.Request, owner: str) -> web.Response:
        """All flags have the SDK's defaults, by which nothing is asked for that is not served."""
        return _json()

    async def _capabilities(self, request: web.Request, owner: str) -> web.Response:
        longest = self._service.config.max_tokens
        models = [
            {"model_name": name, "max_context_length": longest, "trainable": True, "sampleable": True}
            for name in sorted(self._service.names)
        ]
        return _json(supported_models=models)

    async def _create_session(self, request: web.Request, owner: str) -> web.Response:
        session = await self._service.create_session(owner)
        return _json(type="create_session", session_id=session.session_id, info_message=NO_UNEMBEDDING)

    async def _heartbeat(self, request: web.Request, owner: str) -> web.Response:
        await self._service.session((await _body(request, _SessionBody)).session_id, owner)
        return _json(type="session_heartbeat")

    async def _finish(self, request: web.Request, owner: str) -> web.Response:
        await self._service.finish_session(request.match_info["session"], owner)
        return _json()

    async def _telemetry(self, request: web.Request, owner: str) -> web.Response:
        """Nothing of it is kept."""
        await request.read()
        return _json(status="accepted")

    # --- models ---

    async def _create_model(self, request: web.Request, owner: str) -> web.Response:
        return _promise(await self._service.create_model(await _body(request, CreateModel), owner))

    async def _load_weights(self, request: web.Request, owner: str) -> web.Response:
        return _promise(await self._service.load_weights(await _body(request, LoadWeights), owner))

    async def _get_info(self, request: web.Request, owner: str) -> web.Response:
        config = self._service.config
        record = (await self._service.model((await _body(request, _ModelBody)).model_id, owner)).record
        name = config.name or config.model
        data = {"model_name": name, "tokenizer_id": config.model, "arch": "unknown"}
        return _json(
            type="get_info",
            model_data=data,
            model_id=record.model_id,
            is_lora=True,
            lora_rank=record.rank,
            model_name=name,
        )

    async def _forward_backward(self, request: web.Request, owner: str) -> web.Response:
        if request.content_type != PROTOBUF:
            raise BadRequest(f"Content-Type: expected {PROTOBUF}; this version of the SDK is not served")
        body = await request.read()
        message = await asyncio.to_thread(MESSAGES["ForwardBackwardRequest"].FromString, body)
        return _promise(await self._service.offer("forward_backward", message.model_id, message.seq_id, body, owner))

    async def _ordered(self, request: web.Request, owner: str) -> web.Response:
        """Takes a request in JSON that has its place among those of its model."""
        body = await request.read()
        asked = msgspec.json.decode(body, type=_ModelBody)
        if asked.seq_id is None:
            raise BadRequest("seq_id is required")
        kind = request.path.rpartition("/")[2]
        return _promise(await self._service.offer(kind, asked.model_id, asked.seq_id, body, owner))

    async def _weights_info(self, request: web.Request, owner: str) -> web.Response:
        saved = await self._service.saved((await _body(request, _PathBody)).tinker_path, owner)
        record = await asyncio.to_thread(self._service.store.model, saved.model_id)
        assert record is not None
        config = self._service.config
        return _json(base_model=config.name or config.model, is_lora=True, lora_rank=record.rank, train_unembed=False)

    # --- samplers ---

    async def _create_sampler(self, request: web.Request, owner: str) -> web.Response:
        record = await self._service.create_sampler(await _body(request, CreateSampler), owner)
        return _json(type="create_sampling_session", sampling_session_id=record.sampler_id)

    async def _get_sampler(self, request: web.Request, owner: str) -> web.Response:
        record = await self._service.sampler(request.match_info["sampler"], owner)
        config = self._service.config
        return _json(
            sampler_id=record.sampler_id, base_model=config.name or config.model, model_path=record.path or None
        )

    async def _sample(self, request: web.Request, owner: str) -> web.Response:
        request_id, sequence_ids = await self._service.sample(await _body(request, Sample), owner)
        return _json(request_id=request_id, sample_sequence_ids=sequence_ids)

    # --- results ---

    async def _retrieve(self, request: web.Request, owner: str) -> web.Response:
        request_id = (await _body(request, _FutureBody)).request_id
        try:
            result = await self._service.retrieve(request_id, owner, POLL_SECONDS)
        except KeyError:
            return _error(410, f"the result of {request_id[:120]!r} is not kept any more")
        if result is None:
            return _json(type="try_again", request_id=request_id, queue_state="active")
        kind = PROTOBUF if result.is_protobuf else "application/json"
        return web.Response(body=result.body, content_type=kind)


async def _body(request: web.Request, kind: type[Body]) -> Body:
    return msgspec.json.decode(await request.read(), type=kind)


def _json(**values: Any) -> web.Response:
    return web.Response(body=orjson.dumps(values), content_type="application/json")


def _promise(request_id: str) -> web.Response:
    return _json(request_id=request_id)


def _error(status: int, message: str) -> web.Response:
    return web.Response(status=status, body=orjson.dumps({"detail": message}), content_type="application/json")


ENDPOINTS: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/healthz", Endpoints._health),
    ("POST", "/client/config", Endpoints._client_config),
    ("POST", "/client/dynamic_config", Endpoints._client_config),
    ("GET", "/get_server_capabilities", Endpoints._capabilities),
    ("POST", "/create_session", Endpoints._create_session),
    ("POST", "/session_heartbeat", Endpoints._heartbeat),
    ("POST", "/sessions/{session}/finish", Endpoints._finish),
    ("POST", "/telemetry", Endpoints._telemetry),
    ("POST", "/create_model", Endpoints._create_model),
    ("POST", "/load_weights", Endpoints._load_weights),
    ("POST", "/get_info", Endpoints._get_info),
    ("POST", "/forward_backward", Endpoints._forward_backward),
    ("POST", "/optim_step", Endpoints._ordered),
    ("POST", "/save_weights", Endpoints._ordered),
    ("POST", "/save_weights_for_sampler", Endpoints._ordered),
    ("POST", "/weights_info", Endpoints._weights_info),
    ("POST", "/create_sampling_session", Endpoints._create_sampler),
    ("GET", "/samplers/{sampler}", Endpoints._get_sampler),
    ("POST", "/asample", Endpoints._sample),
    ("POST", "/retrieve_future", Endpoints._retrieve),
)
"""Method, path and handler of every endpoint."""
