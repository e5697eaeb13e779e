"""The endpoints of the SDK's protocol, in one table, and the form of answers and errors.

No endpoint works within a request: it takes the request, and the client fetches the result by a long poll, as the SDK does.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from contextlib import nullcontext
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import orjson
from aiohttp import web
from google.protobuf.message import DecodeError

from counterpoint.inference.base import InferenceError
from counterpoint.service.keys import digest
from counterpoint.service.records.structs import ModelRecord, Number, Position, SavedRecord, SessionRecord
from counterpoint.service.tinker.bodies import CreateLoss, CreateModel, CreateSampler, CreateSession, LoadWeights
from counterpoint.service.tinker.dialects import Dialects
from counterpoint.service.tinker.futures import TooMany
from counterpoint.service.tinker.intake import NAMES, RECORDS, RESULTS, TOKENS, Bound, claimed
from counterpoint.service.tinker.listing import (
    Page,
    Search,
    UseWindow,
    checkpoint,
    session_summary,
    time_text,
    training_run,
    usage_events,
)
from counterpoint.service.tinker.refusals import BadRequest, Gone, NoSuchThing, NotServed, OverQuota, TooLarge
from counterpoint.service.tinker.samples.sampling import SampleRequest
from counterpoint.service.tinker.sequence import TooEarly
from counterpoint.service.tinker.service import ATTENTION, FEED_FORWARD, NO_UNEMBEDDING, Service
from counterpoint.service.tinker.sessions import session_of
from counterpoint.service.tinker.weights.external import URL_SECONDS, Signer, names_of, open_file
from counterpoint.transport.http.listening import PROVEN, ProvenConnections
from counterpoint.transport.http.requests import bearer_token, refused_coding
from counterpoint.transport.typed import met

logger = logging.getLogger(__name__)

ROOT = "/api/v1"

POLL_SECONDS = 35.0
"""Seconds that a poll waits for a result. The SDK waits 45 s."""

PAUSE_SECONDS = 25 * 3600
"""Seconds for which clients without tokens for the day repeat a request: until the next day, and an hour."""

MANY_SECONDS = 30.0
"""Seconds that a poll for any of many results waits."""

PIECE_BYTES, PIECE_SECONDS = 2**20, 60.0
"""The bytes of a file that are sent at once, and the seconds that a client may take for them."""

MOST_FETCHED = 8
"""Files of one key that are sent by their URLs at once: encrypted ones take their size on the disk meanwhile."""

AGAIN_SECONDS = "1"
"""The seconds after which a client with a 429 asks again."""

PROTOBUF = "application/x-protobuf"

Body = TypeVar("Body", bound=msgspec.Struct)

Handler = Callable[["Endpoints", web.Request, str], Awaitable[web.Response]]


Cursor = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class _ModelBody(msgspec.Struct, frozen=True):
    model_id: str
    seq_id: Number | None = None


class _SessionBody(msgspec.Struct, frozen=True):
    session_id: str


class _FutureBody(msgspec.Struct, frozen=True):
    request_id: str


class _Target(msgspec.Struct, frozen=True):
    sampling_session_id: str
    cloned_sampler_id: Position = 0


class _FuturesBody(msgspec.Struct, frozen=True):
    target: _Target
    prev_cursor: Cursor = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = []


class _SamplerBody(msgspec.Struct, frozen=True):
    sampling_session_id: str


class _ProjectBody(msgspec.Struct, frozen=True):
    project_id: str


class _TtlBody(msgspec.Struct, frozen=True):
    ttl_seconds: int | None


class _Reason(msgspec.Struct, frozen=True):
    type: Literal["success", "errored", "interrupted"] = "success"


class _Ending(msgspec.Struct, frozen=True):
    reason: _Reason = _Reason()
    detail: str | None = None


class _PathBody(msgspec.Struct, frozen=True):
    tinker_path: str


BOUNDS: dict[type[msgspec.Struct], Bound] = {
    **dict.fromkeys((CreateSession, CreateModel, LoadWeights, CreateLoss, Search, _ModelBody), RECORDS),
    _FuturesBody: RESULTS,
    SampleRequest: TOKENS,
}
"""The bounds of bodies that have more than names and numbers."""


class Endpoints:
    """The endpoints, over one service."""

    def __init__(self, service: Service, keys: Collection[bytes]) -> None:
        """`keys` are the digests of the accepted ones. Without any, every request is accepted."""
        self._service = service
        self._keys = keys
        self._intake = service.intake
        self._signer = Signer(service.store.secret("urls").encode())
        self._fetched = Counter[str]()
        """The files of each owner that are being sent by their URLs."""
        self._encrypting = asyncio.Lock()
        """Held while a file is encrypted: many encryptions would take all threads, and every client would wait."""

    def app(self) -> web.Application:
        """Returns the application, with every endpoint."""
        app = web.Application()
        app[PROVEN] = ProvenConnections()
        for method, path, handler in ENDPOINTS:
            app.router.add_route(method, ROOT + path, self._guarded(handler))
        app.router.add_get(f"{ROOT}{_CHECKPOINT}/file", self._file)
        if self._service.chat is not None:
            Dialects(self._service, self._service.chat, self._owner).add_to(app)
        return app

    def _guarded(self, handler: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            owner = self._owner(request)
            if owner is None:
                return _error(401, "the key is none of those that are taken; set TINKER_API_KEY")
            if not request.app[PROVEN].note(request, owner):
                return _too_many_connections()
            if not _is_zstd(request) and (refusal := refused_coding(request.headers.items())) is not None:
                return _error(415, refusal)
            try:
                with self._intake.room(owner, claimed(request)):
                    return await handler(self, request, owner)
            except NoSuchThing as error:
                return _error(404, str(error))
            except Gone as error:
                return _error(410, str(error))
            except (TooMany, TooEarly) as error:
                return _error(429, str(error))
            except TooLarge as error:
                return _error(413, str(error))
            except OverQuota as error:
                return _error(402 if error.ends_by_itself else 403, str(error))
            except NotServed as error:
                return _error(400, str(error))
            except (BadRequest, msgspec.MsgspecError, DecodeError, ValueError, RecursionError) as error:
                return _error(422, str(error))
            except (InferenceError, OSError) as error:
                return _error(503, str(error))
            except web.HTTPException:
                raise
            except Exception as error:  # the SDK would repeat the request for minutes after a 500
                logger.exception("%s %s failed", request.method, request.path[:200])
                return _error(422, f"the service failed: {type(error).__name__}; its log says more")

        return handle

    async def _body(self, request: web.Request, owner: str, kind: type[Body]) -> Body:
        return (await self._intake.json(request, owner, kind, BOUNDS.get(kind, NAMES)))[0]

    def _owner(self, request: web.Request) -> str | None:
        """Returns the owner of a request's key, empty without keys, or None for a wrong key."""
        if not self._keys:
            return ""
        given = digest(bearer_token(request.headers.get("Authorization")) or request.headers.get("X-API-Key", ""))
        known = [key for key in self._keys if hmac.compare_digest(key, given)]
        return known[0].hex() if known else None

    # --- the client, the server and sessions ---

    async def _health(self, request: web.Request, owner: str) -> web.Response:
        return _json(status="ok")

    async def _client_config(self, request: web.Request, owner: str) -> web.Response:
        """Other flags have the SDK's defaults, which ask for nothing that the service lacks."""
        always = {"create_model_via_load_weights", "sample_join_sampling_session", "custom_loss_server_side"}
        flags = {*self._service.config.client_flags, *always}
        return _json(**dict.fromkeys(sorted(flags), True), billing_exception_max_pause_duration_sec=PAUSE_SECONDS)

    async def _dynamic_config(self, request: web.Request, owner: str) -> web.Response:
        return _json(sample_cancel_enabled=True)

    async def _capabilities(self, request: web.Request, owner: str) -> web.Response:
        longest = self._service.config.max_tokens
        models = [
            {"model_name": name, "max_context_length": longest, "trainable": True, "sampleable": True}
            for name in sorted(self._service.names)
        ]
        return _json(supported_models=models)

    async def _create_session(self, request: web.Request, owner: str) -> web.Response:
        session = await self._service.create_session(await self._body(request, owner, CreateSession), owner)
        return _json(type="create_session", session_id=session.session_id, info_message=NO_UNEMBEDDING)

    async def _heartbeat(self, request: web.Request, owner: str) -> web.Response:
        await self._service.sessions.live((await self._body(request, owner, _SessionBody)).session_id, owner)
        return _json(type="session_heartbeat")

    async def _finish(self, request: web.Request, owner: str) -> web.Response:
        ending = await self._body(request, owner, _Ending)
        await self._service.finish_session(request.match_info["session"], owner, msgspec.to_builtins(ending))
        return _json()

    async def _sessions(self, request: web.Request, owner: str) -> web.Response:
        page = _query(request, Page)
        return await self._listed(
            owner, lambda: {"sessions": [each.session_id for each in page.of(self._own_sessions(owner))]}
        )

    async def _session(self, request: web.Request, owner: str) -> web.Response:
        session = await self._service.sessions.any(request.match_info["session"], owner)
        service, session_id = self._service, session.session_id

        def made() -> dict[str, Any]:
            [noted] = service.store.noted([session])
            return {
                "training_run_ids": [each.model_id for each in service.models(owner, session_id)],
                "sampler_ids": [each.sampler_id for each in service.store.samplers(session_id)],
                "user_metadata": noted.user_metadata,
                "display_name": noted.display_name,
            }

        return await self._listed(owner, made)

    async def _search(self, request: web.Request, owner: str) -> web.Response:
        search, store = await self._body(request, owner, Search), self._service.store

        def made() -> dict[str, Any]:
            found, cursor = search.page(self._own_sessions(owner), lambda each: store.noted([each])[0])
            saved = {each.session_id: self._saved_in(owner, each.session_id) for each in found}
            page = store.noted(found)
            return {
                "sessions": [session_summary(each, saved[each.session_id]) for each in page],
                "next_cursor": msgspec.to_builtins(cursor),
            }

        return await self._listed(owner, made)

    async def _listed(self, owner: str, made: Callable[[], dict[str, Any]]) -> web.Response:
        """Answers with a list of records from `made`, which takes long for many."""
        body = await self._intake.computed(owner, lambda: msgspec.json.encode(made()))
        return web.Response(body=body, content_type="application/json")

    def _own_sessions(self, owner: str) -> list[SessionRecord]:
        """Returns an owner's sessions, the newest first. Blocks."""
        found = self._service.store.sessions(owner)
        return sorted(found, key=lambda each: (each.created, each.session_id), reverse=True)

    def _saved_in(self, owner: str, session_id: str | None) -> list[SavedRecord]:
        """Returns an owner's saved weights, the newest first. Blocks."""
        found = [each for each in self._service.store.saved_of(owner, session_id) if not each.has_expired]
        return sorted(found, key=lambda each: (each.created, each.path), reverse=True)

    async def _key(self, request: web.Request, owner: str) -> web.Response:
        name = self._service.tenants.name(owner)
        details = {"org_details": {"name": "local"}, "user_details": {"email": name}}
        return _json(key_id=int(owner[:8] or "0", 16), name=name, note="", details=details)

    async def _usage(self, request: web.Request, owner: str) -> web.Response:
        service, window = self._service, _query(request, UseWindow)
        days, price = service.store.ledger.days(), service.config.price
        return _json(data=usage_events(days, owner, window, service.base_model, price), sessions={})

    async def _storage(self, request: web.Request, owner: str) -> web.Response:
        wanted = request.query.get("project_id")

        def made() -> dict[str, Any]:
            projects = {each.session_id: each.project for each in self._own_sessions(owner)}
            sizes: dict[str, list[int]] = {}
            for saved in self._saved_in(owner, None):
                sizes.setdefault(projects.get(session_of(saved.model_id), ""), []).append(saved.size or 0)
            items = [
                {
                    "project_id": name or None,
                    "checkpoint_count": len(each),
                    "size_bytes": sum(each),
                    "size_gigabytes": sum(each) / 1e9,
                }
                for name, each in sorted(sizes.items())
                if wanted in (None, name)
            ]
            return {"data": items}

        return await self._listed(owner, made)

    async def _assign(self, request: web.Request, owner: str) -> web.Response:
        project = (await self._body(request, owner, _ProjectBody)).project_id
        await self._service.assign_project(request.match_info["session"], owner, project)
        return _json()

    async def _unserved(self, request: web.Request, owner: str) -> web.Response:
        raise NotServed(
            f"{request.method} {request.path[:200]} is not served: weights are files of this machine, and none are "
            "public (docs/tinker.md)"
        )

    async def _telemetry(self, request: web.Request, owner: str) -> web.Response:
        """Reads none of it."""
        return _json(status="accepted")

    # --- models ---

    async def _create_model(self, request: web.Request, owner: str) -> web.Response:
        return _promise(await self._service.create_model(await self._body(request, owner, CreateModel), owner))

    async def _load_weights(self, request: web.Request, owner: str) -> web.Response:
        asked, body = await self._intake.json(request, owner, LoadWeights, BOUNDS[LoadWeights])
        return _promise(await self._service.load_weights(asked, owner, body))

    async def _unload(self, request: web.Request, owner: str) -> web.Response:
        return _promise(
            await self._service.unload_model((await self._body(request, owner, _ModelBody)).model_id, owner)
        )

    async def _get_info(self, request: web.Request, owner: str) -> web.Response:
        config = self._service.config
        record = (await self._service.model((await self._body(request, owner, _ModelBody)).model_id, owner)).record
        name = self._service.base_model
        data = {"model_name": name, "tokenizer_id": config.model, "arch": "unknown"}
        return _json(
            type="get_info",
            model_data=data,
            model_id=record.model_id,
            is_lora=True,
            lora_rank=record.rank,
            model_name=name,
        )

    async def _create_custom_loss(self, request: web.Request, owner: str) -> web.Response:
        return _promise(await self._service.create_loss(await self._body(request, owner, CreateLoss), owner))

    async def _forward_backward(self, request: web.Request, owner: str) -> web.Response:
        if request.content_type != PROTOBUF:
            raise BadRequest(f"Content-Type: expected {PROTOBUF}; this version of the SDK is not served")
        async with self._intake.message(request, owner, is_zstd=_is_zstd(request)) as asked:
            offered = self._service.offer(
                "forward_backward", asked.model_id, asked.seq_id, asked.body, owner, asked.tokens
            )
            return _promise(await offered)

    async def _ordered(self, request: web.Request, owner: str) -> web.Response:
        """Takes a request in JSON that has its place among those of its model."""
        asked, body = await self._intake.json(request, owner, _ModelBody, BOUNDS[_ModelBody])
        if asked.seq_id is None:
            raise BadRequest("seq_id is required")
        kind = request.path.rpartition("/")[2]
        return _promise(await self._service.offer(kind, asked.model_id, asked.seq_id, body, owner))

    async def _weights_info(self, request: web.Request, owner: str) -> web.Response:
        record = await self._service.source((await self._body(request, owner, _PathBody)).tinker_path, owner)
        return _json(
            base_model=self._service.base_model,
            is_lora=True,
            lora_rank=record.rank,
            train_unembed=False,
            train_mlp=set(FEED_FORWARD) <= set(record.target_modules),
            train_attn=set(ATTENTION) <= set(record.target_modules),
        )

    async def _training_runs(self, request: web.Request, owner: str) -> web.Response:
        page, project = _query(request, Page), request.query.get("project_id")

        def made() -> dict[str, Any]:
            models = self._service.models(owner)
            if project is not None:
                within = {each.session_id for each in self._own_sessions(owner) if each.project == project}
                models = [each for each in models if session_of(each.model_id) in within]
            noted = self._service.store.noted(page.of(models))
            return {"training_runs": [self._described(each) for each in noted], "cursor": page.cursor(len(models))}

        return await self._listed(owner, made)

    async def _training_run(self, request: web.Request, owner: str) -> web.Response:
        model = await self._service.owned_model(request.match_info["model"], owner)
        return await self._listed(owner, lambda: self._described(model))

    def _described(self, model: ModelRecord) -> dict[str, Any]:
        """Returns a model as the SDK has it. Blocks."""
        saved = self._service.weights.all_of(model)
        last = {each.kind: each for each in reversed(saved)}  # the newest of each kind is shown
        return training_run(
            model,
            self._service.store.noted(last.values()),
            self._service.base_model,
            self._service.sessions.last_seen(session_of(model.model_id)),
        )

    async def _checkpoints(self, request: web.Request, owner: str) -> web.Response:
        model, service = await self._service.owned_model(request.match_info["model"], owner), self._service

        def made() -> dict[str, Any]:
            noted = service.store.noted(service.weights.all_of(model))
            return {"checkpoints": [checkpoint(each) for each in noted], "cursor": None}

        return await self._listed(owner, made)

    async def _all_checkpoints(self, request: web.Request, owner: str) -> web.Response:
        page = _query(request, Page)

        def made() -> dict[str, Any]:
            found = self._saved_in(owner, None)
            noted = self._service.store.noted(page.of(found))
            return {"checkpoints": [checkpoint(each) for each in noted], "cursor": page.cursor(len(found))}

        return await self._listed(owner, made)

    async def _delete_checkpoint(self, request: web.Request, owner: str) -> web.Response:
        await self._service.weights.delete(_uri(request), owner)
        self._service.sweep_soon()
        return _json()

    async def _set_ttl(self, request: web.Request, owner: str) -> web.Response:
        await self._service.weights.set_ttl(
            _uri(request), (await self._body(request, owner, _TtlBody)).ttl_seconds, owner
        )
        return _json()

    async def _external_urls(self, request: web.Request, owner: str) -> web.Response:
        record = await self._service.weights.named(_uri(request), owner)
        if record.kind != "external_weights":
            raise BadRequest(f"{record.path[:200]} has no URLs; expected weights of save_weights_external")
        expires = int(time.time() + URL_SECONDS)
        # Behind a proxy the client's scheme. A client that makes it up misleads nobody else.
        scheme = "https" if request.headers.get("X-Forwarded-Proto") == "https" else request.scheme
        origin = request.url.origin().with_scheme(scheme)
        place = origin.joinpath(request.path.removeprefix("/").rpartition("/")[0] + "/file")
        urls = {
            name: str(place.with_query(self._signer.query(record.path, name, expires)))
            for name in names_of(record.recipients)
        }
        return _json(urls=urls, expires=time_text(expires))

    async def _file(self, request: web.Request) -> web.StreamResponse:
        """Sends a file of external weights to a client with its signed URL."""
        asked, path = request.query, _uri(request)
        name = asked.get("file", "")
        if not self._signer.permits(path, name, asked.get("expires", ""), asked.get("signature", ""), time.time()):
            return _error(403, "the URL was not made here, or has expired; ask for URLs again")
        record = await asyncio.to_thread(self._service.store.saved, path)
        model = None if record is None else await asyncio.to_thread(self._service.store.model, record.model_id)
        if record is None or model is None or name not in names_of(record.recipients):
            return _error(404, f"there are no weights {path[:120]!r}")
        if not request.app[PROVEN].note(request, model.owner):
            return _too_many_connections()
        if self._fetched[model.owner] >= MOST_FETCHED:
            return _error(429, f"{MOST_FETCHED} files of this key are being fetched; wait until one is whole")
        self._fetched[model.owner] += 1
        try:
            return await self._sent(request, record, name)
        finally:
            self._fetched[model.owner] -= 1

    async def _sent(self, request: web.Request, record: SavedRecord, name: str) -> web.StreamResponse:
        try:
            async with self._encrypting if record.recipients else nullcontext():
                file, size = await asyncio.to_thread(open_file, record.directory, name, record.recipients)
        except OSError as error:
            return _error(503, f"{record.path[:120]}: {name}: {error.strerror}")
        with file:
            response = web.StreamResponse(
                headers={"Content-Type": "application/octet-stream", "Content-Length": str(size)}
            )
            await response.prepare(request)
            while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                async with asyncio.timeout(PIECE_SECONDS):
                    await response.write(piece)
            await response.write_eof()
        return response

    # --- samplers ---

    async def _create_sampler(self, request: web.Request, owner: str) -> web.Response:
        record = await self._service.samplers.create(await self._body(request, owner, CreateSampler), owner)
        return _json(type="create_sampling_session", sampling_session_id=record.sampler_id)

    async def _get_sampler(self, request: web.Request, owner: str) -> web.Response:
        record = await self._service.samplers.named(request.match_info["sampler"], owner)
        base = self._service.base_model
        return _json(sampler_id=record.sampler_id, base_model=base, model_path=record.path or None)

    async def _join(self, request: web.Request, owner: str) -> web.Response:
        number = await self._service.samplers.join(
            (await self._body(request, owner, _SamplerBody)).sampling_session_id, owner
        )
        return _json(type="join_sampling_session", client_counter=number)

    async def _sample(self, request: web.Request, owner: str) -> web.Response:
        request_id, sequence_ids = await self._service.samplers.sample(
            await self._body(request, owner, SampleRequest), owner
        )
        return _json(request_id=request_id, sample_sequence_ids=sequence_ids)

    # --- results ---

    async def _retrieve(self, request: web.Request, owner: str) -> web.Response:
        request_id = (await self._body(request, owner, _FutureBody)).request_id
        try:
            result = await self._service.retrieve(request_id, owner, POLL_SECONDS)
        except KeyError:
            return _error(410, f"the result of {request_id[:120]!r} is not kept any more")
        if result is None:
            reason = self._service.waits_for(request_id)
            state = "paused_capacity" if reason else "active"
            return _json(type="try_again", request_id=request_id, queue_state=state, queue_state_reason=reason or None)
        kind = PROTOBUF if result.is_protobuf else "application/json"
        return web.Response(body=result.body, content_type=kind)

    async def _retrieve_many(self, request: web.Request, owner: str) -> web.Response:
        """Answers which samples of a client have a result. The client fetches the results one by one."""
        asked = await self._body(request, owner, _FuturesBody)
        sampler = await self._service.samplers.named(asked.target.sampling_session_id, owner)
        futures, client = self._service.results.of(owner), (sampler.sampler_id, asked.target.cloned_sampler_id)
        futures.retrieved(client, asked.retrieved_request_ids)
        seconds = MANY_SECONDS if asked.timeout is None else min(max(asked.timeout, 0.0), MANY_SECONDS)
        try:
            found, cursor = await futures.completions(client, asked.prev_cursor, seconds)
        except KeyError:
            return _error(
                410, "the service was started again meanwhile, and its results are lost; make the sampler anew"
            )
        completions = [
            {"state": "failed", "request_id": name}
            if size is None
            else {"state": "finished", "request_id": name, "response_payload_uncompressed_size": size}
            for name, size in found
        ]
        return _json(completions=completions, cursor=cursor)

    async def _cancel(self, request: web.Request, owner: str) -> web.Response:
        await self._service.samplers.cancel((await self._body(request, owner, _FutureBody)).request_id, owner)
        return _json()


def _is_zstd(request: web.Request) -> bool:
    """Whether a request may have a compressed body, and has one."""
    return request.path == f"{ROOT}/forward_backward" and request.headers.get("Content-Encoding", "").lower() == "zstd"


def _query(request: web.Request, kind: type[Body]) -> Body:
    return msgspec.convert(dict(request.query), type=met(kind), strict=False)


def _uri(request: web.Request) -> str:
    given = request.match_info
    return f"tinker://{given['model']}/{given['kind']}/{given['name']}"


def _json(**values: Any) -> web.Response:
    # Metadata may have numbers of any length.
    return web.Response(body=msgspec.json.encode(values), content_type="application/json")


def _promise(request_id: str) -> web.Response:
    return _json(request_id=request_id)


def _error(status: int, message: str) -> web.Response:
    headers = {"Retry-After": AGAIN_SECONDS} if status == 429 else None
    body = orjson.dumps({"detail": message})
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def _too_many_connections() -> web.Response:
    response = _error(429, "this key has its share of connections; close some, or use them again")
    response.force_close()
    return response


_CHECKPOINT = "/training_runs/{model}/checkpoints/{kind}/{name}"

UNSERVED = (
    ("POST", "/auth/token"),
    ("DELETE", "/auth/apikey/me"),
    ("POST", "/copy_weights"),
    ("POST", _CHECKPOINT + "/publish"),
    ("DELETE", _CHECKPOINT + "/publish"),
    ("GET", _CHECKPOINT + "/archive"),
    ("GET", "/sessions/{session}/trace_export"),
    ("GET", "/audit"),
)
"""Method and path of the SDK's endpoints that the service refuses with a sentence."""

ENDPOINTS: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/healthz", Endpoints._health),
    ("POST", "/client/config", Endpoints._client_config),
    ("POST", "/client/dynamic_config", Endpoints._dynamic_config),
    ("GET", "/get_server_capabilities", Endpoints._capabilities),
    ("POST", "/create_session", Endpoints._create_session),
    ("POST", "/session_heartbeat", Endpoints._heartbeat),
    ("POST", "/sessions/{session}/finish", Endpoints._finish),
    ("GET", "/sessions", Endpoints._sessions),
    ("GET", "/sessions/{session}", Endpoints._session),
    ("POST", "/sessions/search", Endpoints._search),
    ("PUT", "/sessions/{session}/project", Endpoints._assign),
    ("POST", "/telemetry", Endpoints._telemetry),
    ("GET", "/auth/apikey/me", Endpoints._key),
    ("GET", "/billing/usage/events", Endpoints._usage),
    ("GET", "/billing/usage/checkpoints/current", Endpoints._storage),
    ("POST", "/create_model", Endpoints._create_model),
    ("POST", "/create_custom_loss", Endpoints._create_custom_loss),
    ("POST", "/load_weights", Endpoints._load_weights),
    ("POST", "/unload_model", Endpoints._unload),
    ("POST", "/get_info", Endpoints._get_info),
    ("POST", "/forward_backward", Endpoints._forward_backward),
    ("POST", "/optim_step", Endpoints._ordered),
    ("POST", "/save_weights", Endpoints._ordered),
    ("POST", "/save_weights_for_sampler", Endpoints._ordered),
    ("POST", "/save_weights_external", Endpoints._ordered),
    ("POST", "/weights_info", Endpoints._weights_info),
    ("GET", "/training_runs", Endpoints._training_runs),
    ("GET", "/training_runs/{model}", Endpoints._training_run),
    ("GET", "/training_runs/{model}/checkpoints", Endpoints._checkpoints),
    ("GET", "/checkpoints", Endpoints._all_checkpoints),
    ("DELETE", _CHECKPOINT, Endpoints._delete_checkpoint),
    ("PUT", _CHECKPOINT + "/ttl", Endpoints._set_ttl),
    ("GET", _CHECKPOINT + "/external_weights_urls", Endpoints._external_urls),
    ("POST", "/create_sampling_session", Endpoints._create_sampler),
    ("POST", "/join_sampling_session", Endpoints._join),
    ("GET", "/samplers/{sampler}", Endpoints._get_sampler),
    ("POST", "/asample", Endpoints._sample),
    ("POST", "/retrieve_future", Endpoints._retrieve),
    ("POST", "/retrieve_futures", Endpoints._retrieve_many),
    ("POST", "/cancel_future", Endpoints._cancel),
    *((method, path, Endpoints._unserved) for method, path in UNSERVED),
)
"""Method, path and handler of every endpoint."""
