"""The web application: who may enter, the routes of every endpoint and of the page, and how answers look.

`counterpoint/serve/endpoint.py` says what an endpoint is; `ENDPOINTS` here lists them all. The page's files are a fixed list
(`Statics`), so that no request can name another file. `counterpoint/serve/main.py` runs the application.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from counterpoint.serve.access import RateLimit, Tokens
from counterpoint.serve.answers import AnswerBytes, KeptAnswers
from counterpoint.serve.api import (
    cluster,
    fleet,
    groups,
    logs,
    loop,
    overview,
    population,
    profiles,
    rollout_search,
    rollouts,
    runs,
    steering,
    sweep,
    tenants,
    timeline,
    tokens,
    usage,
)
from counterpoint.serve.api import jobs as jobs_api
from counterpoint.serve.audit import ApiCaller, AuditLog
from counterpoint.serve.endpoint import ROOT, Endpoint
from counterpoint.serve.errors import (
    ApiError,
    BadParameter,
    BodyTooLarge,
    Forbidden,
    NotFound,
    ProblemAnswer,
    RateLimited,
    Unauthorized,
    Unexpected,
    WrongType,
)
from counterpoint.serve.jobs import Jobs
from counterpoint.serve.openapi import document_of
from counterpoint.serve.origin import check_origin
from counterpoint.serve.parameters import from_body, from_query, lists_of
from counterpoint.transport.http.listening import PROVEN, ProvenConnections
from counterpoint.transport.http.requests import refused_coding
from counterpoint.transport.printable import printable
from counterpoint.transport.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)

ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (
    *jobs_api.ENDPOINTS,
    *overview.ENDPOINTS,
    *runs.ENDPOINTS,
    *loop.ENDPOINTS,
    *steering.ENDPOINTS,
    *rollouts.ENDPOINTS,
    *rollout_search.ENDPOINTS,
    *tokens.ENDPOINTS,
    *timeline.ENDPOINTS,
    *groups.ENDPOINTS,
    *fleet.ENDPOINTS,
    *tenants.ENDPOINTS,
    *usage.ENDPOINTS,
    *profiles.ENDPOINTS,
    *population.ENDPOINTS,
    *sweep.ENDPOINTS,
    *cluster.ENDPOINTS,
    *logs.ENDPOINTS,
)
"""Every operation of the API: one line a file of `counterpoint/serve/api/`."""

MAX_BODY_BYTES = 64 * 2**10
BODY_SECONDS = 10.0
"""How long a request's body may take to arrive."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Server": "counterpoint",
}
"""The headers of every answer. Nothing is allowed to foreign pages, and the page may load nothing from elsewhere."""

WRONG_TOKENS_PER_MINUTE = 30.0
"""The wrong tokens of one client. A right token passes all the same: it may come from behind the same proxy."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of who may enter, and how often."""

    tokens: Tokens
    own_names: frozenset[str]
    """The names in `Host` that are ours."""
    requests_per_second: float
    changes_per_minute: float


def build_app(
    jobs: Jobs, access: Access, audit: AuditLog, endpoints: tuple[Endpoint[Any, Any], ...] = ENDPOINTS
) -> web.Application:
    """Returns the application. Its clean-up closes what it started."""
    guard = _Guard(access)
    app = web.Application(middlewares=[guard.pass_through], client_max_size=MAX_BODY_BYTES)
    app[PROVEN] = ProvenConnections()
    answers = KeptAnswers(jobs, audit)
    operations = _Operations(answers)
    for endpoint in endpoints:
        app.router.add_route(endpoint.method, ROOT + endpoint.path, operations.handler_of(endpoint))
    document = document_of(endpoints)

    async def describe(request: web.Request) -> web.StreamResponse:
        return web.json_response(body=document)

    app.router.add_route("GET", f"{ROOT}/openapi.json", describe)

    async def tell_access(request: web.Request) -> web.StreamResponse:
        """What the token allows, so that the page offers nothing that would be refused."""
        return web.json_response({"access": access.tokens.access_of(request.headers.get("Authorization"))})

    app.router.add_route("GET", f"{ROOT}/session", tell_access)
    page = Statics()

    async def show(request: web.Request) -> web.StreamResponse:
        return _static(request, page)

    app.router.add_route("GET", "/{path:.*}", show)

    async def close(_: web.Application) -> None:
        answers.close()

    async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(HEADERS)

    app.on_response_prepare.append(add_headers)
    app.on_cleanup.append(close)
    return app


class _Guard:
    """Lets in whom `Access` allows, and turns every error into a `Problem`."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._requests = RateLimit(access.requests_per_second, 2 * access.requests_per_second)
        self._changes = RateLimit(access.changes_per_minute / 60, access.changes_per_minute / 2)
        self._strangers = RateLimit(WRONG_TOKENS_PER_MINUTE / 60, WRONG_TOKENS_PER_MINUTE)
        self._log = RateLimitedLog(logger)

    @property
    def pass_through(self) -> Any:
        """Lets a request through, as middleware."""

        @web.middleware
        async def enter(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                self._check(request)
                return await handler(request)
            except ApiError as error:
                return _problem(error)
            except web.HTTPRequestEntityTooLarge:
                return _problem(BodyTooLarge("the body is too large", expected=f"at most {MAX_BODY_BYTES} bytes"))
            except web.HTTPException as error:
                return _problem(_of_http(error, request), error.status, {"Allow": error.headers.get("Allow", "")})
            except Exception:
                logger.exception("%s failed", request.method)
                return _problem(Unexpected())

        return enter

    def _check(self, request: web.Request) -> None:
        """Raises `ApiError` for a request that may not pass."""
        client = request.remote or ""
        self._count(self._requests, client)
        resource = request.match_info.route.resource  # None where nothing is
        found = request.path if resource is None else resource.canonical
        is_api = any(f"{path}/".startswith("/api/") for path in (request.path, found))
        check_origin(request.headers, self._access.own_names, is_api=is_api)
        if not is_api:
            return
        allowed = self._access.tokens.access_of(request.headers.get("Authorization"))
        if allowed is None:
            self._count(self._strangers, client)
            if "Authorization" in request.headers:
                self._log.note(logging.WARNING, f"{client}: a wrong token for {printable(request.path)[:100]}")
            raise Unauthorized
        if not request.app[PROVEN].note(request, allowed):
            raise RateLimited(1)
        if request.method != "GET":
            if allowed != "change":
                self._log.note(logging.WARNING, f"{client}: the read token for {printable(request.path)[:100]}")
                raise Forbidden("this token may only read", where="Authorization", expected="the admin token")
            self._count(self._changes, client)

    @staticmethod
    def _count(limit: RateLimit, client: str) -> None:
        if seconds := limit.take(client):
            raise RateLimited(seconds)


class _Operations:
    """The handlers of endpoints."""

    def __init__(self, answers: KeptAnswers) -> None:
        self._answers = answers

    def handler_of(self, endpoint: Endpoint[Any, Any]) -> Handler:
        """Returns the handler of one endpoint."""
        lists = lists_of(endpoint.parameters)

        async def read(request: web.Request) -> web.StreamResponse:
            parameters = from_query(endpoint, lists, request.match_info, [*request.query.items()])
            return _answered(request, await self._answers.read(endpoint, parameters))

        async def change(request: web.Request) -> web.StreamResponse:
            parameters = from_body(endpoint, request.match_info, await _body(request))
            return _answered(request, await self._answers.change(endpoint, parameters, ApiCaller(request.remote or "")))

        return read if endpoint.access == "read" else change


async def _body(request: web.Request) -> bytes:
    if request.content_type != "application/json" and request.can_read_body:
        raise WrongType("the body is not JSON", where="Content-Type", expected="application/json")
    if (why := refused_coding(request.headers.items())) is not None:
        raise WrongType(why, where="Content-Encoding", expected="a plain body")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise BadParameter(f"the body took more than {BODY_SECONDS:g} s", where="body") from None


def _answered(request: web.Request, answer: AnswerBytes) -> web.StreamResponse:
    headers = {"ETag": answer.tag, "Cache-Control": "private, no-cache", "Vary": "Accept-Encoding, Authorization"}
    if request.method == "GET" and answer.tag in request.headers.get("If-None-Match", ""):
        return web.Response(status=304, headers=headers)
    if answer.compressed is not None and "gzip" in request.headers.get("Accept-Encoding", ""):
        return web.Response(
            body=answer.compressed, content_type="application/json", headers=headers | {"Content-Encoding": "gzip"}
        )
    return web.Response(body=answer.body, content_type="application/json", headers=headers)


def _static(request: web.Request, statics: Statics) -> web.StreamResponse:
    found = statics.get(request.match_info["path"])
    if found is None:
        raise NotFound(f"there is no page {request.path[:100]!r}", advice="the page is at /, the API below /api/v1")
    headers = {"ETag": found.tag, "Cache-Control": "no-cache"}
    if found.tag in request.headers.get("If-None-Match", ""):
        return web.Response(status=304, headers=headers)
    return web.Response(body=found.content, headers=headers | {"Content-Type": found.type})


def _problem(error: ApiError, status: int | None = None, headers: dict[str, str] | None = None) -> web.Response:
    kept = {name: value for name, value in (headers or {}).items() if value} | {"Cache-Control": "no-store"}
    if isinstance(error, Unauthorized):
        kept["WWW-Authenticate"] = 'Bearer realm="counterpoint"'
    if isinstance(error, RateLimited):
        kept["Retry-After"] = str(math.ceil(error.seconds))
    body = ProblemAnswer(error=error.problem).model_dump_json().encode()
    return web.Response(status=status or error.status, body=body, content_type="application/json", headers=kept)


def _of_http(error: web.HTTPException, request: web.Request) -> ApiError:
    """What aiohttp's own errors are called here."""
    if error.status == 405:
        return ApiError(
            f"{request.method} is not possible here", where="method", expected=error.headers.get("Allow", "")
        )
    return ApiError(error.reason or "this is no valid request")


PAGE = Path(__file__).parent / "page"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
}
"""What is served. Other files, such as licences, are not."""


@dataclass(frozen=True, slots=True)
class Static:
    """A file of the page."""

    content: bytes
    type: str
    tag: str


class Statics:
    """The files by their path in the URL, listed once, read again when they change."""

    def __init__(self, directory: Path = PAGE) -> None:
        """`directory` holds `index.html`, which stands for `/`, too."""
        self._files = {
            path.relative_to(directory).as_posix(): path
            for path in directory.rglob("*")
            if path.suffix in _TYPES and path.is_file()
        }
        self._read: dict[str, tuple[int, Static]] = {}

    def get(self, path: str) -> Static | None:
        """Returns the file at `path`, below `/`; None if there is none."""
        name = path or "index.html"
        file = self._files.get(name)
        if file is None:
            return None
        changed = file.stat().st_mtime_ns
        if name not in self._read or self._read[name][0] != changed:
            content = file.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            self._read[name] = changed, Static(content, _TYPES[file.suffix], tag)
        return self._read[name][1]
