"""The direct way of model calls to their route, past layers of the API server that they do not need.

For a call of a few tokens, counting the request, finding the route and resolving its dependencies takes two fifths of the API
server's CPU. This middleware stands inside those that guard the server (the token, vLLM's scaling) and answers a POST to one path
itself, with the app's own handlers of exceptions. Everything else goes on to the app. vLLM's `http_requests_total` and the like
do not count these calls; the engine's metrics do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.middleware.exceptions import ExceptionMiddleware

Endpoint = Callable[[Request], Awaitable[Response]]


class DirectRoute:
    """ASGI middleware: `endpoint` answers a POST to `path`."""

    def __init__(self, app: Any, path: str, endpoint: Endpoint) -> None:
        self._app = app
        self._path = path
        self._endpoint = endpoint
        self._guarded: ExceptionMiddleware | None = None
        """Made at the first call, since vLLM registers its handlers after its middleware."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles one ASGI connection."""
        if scope["type"] != "http" or scope["path"] != self._path or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._guarded is None:
            self._guarded = self._with_handlers_of(scope["app"])
        await self._guarded(scope, receive, send)

    def _with_handlers_of(self, app: FastAPI) -> ExceptionMiddleware:
        # The outermost layer handles what has no other handler, here as everywhere.
        handlers = {kind: handler for kind, handler in app.exception_handlers.items() if kind not in (500, Exception)}
        return ExceptionMiddleware(self._answer, handlers)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        response = await self._endpoint(Request(scope, receive, send))
        await response(scope, receive, send)
