"""The bearer token on every route of a server that listens beyond loopback, and plain bodies on every route of any server.

vLLM's own check (0.32) guards paths below `/v1`, `/v2`, `/inference` and `/cohere`, leaves open all others, ours among them, and
keeps the token that it was started with. This is added by vLLM's `--middleware` and leaves open only `/health` and `/metrics`,
which say nothing about a request. The tokens are read again when their file changes.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from functools import partial
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from counterpoint.inference.call_frames import CALLS_PATH
from counterpoint.inference.token import API_KEY_FILE_VARIABLE, watched_tokens
from counterpoint.transport.http.requests import bearer_token, refused_coding

OPEN_PATHS = frozenset({"/health", "/metrics"})

STILL_ALLOWED = "counterpoint.still_allowed"
"""Where the scope of a request for a connection of many calls has a function: whether the server takes its token now."""


class PlainBodies:
    """ASGI middleware: answers 415 to a request whose body is compressed, without reading it."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles one ASGI connection."""
        why = refused_coding(Headers(scope=scope).items()) if scope["type"] == "http" else None
        if why is not None:
            await JSONResponse({"error": why}, status_code=415)(scope, receive, send)
            return
        await self._app(scope, receive, send)


class RequireToken:
    """ASGI middleware: answers 401 without `Authorization: Bearer <token>`, one of those in the file."""

    def __init__(self, app: Any) -> None:
        """Raises `ValueError` without a token."""
        if not (path := os.environ.get(API_KEY_FILE_VARIABLE)):
            raise ValueError(f"{API_KEY_FILE_VARIABLE} is not set: there is no token to require")
        self._app = app
        self._tokens = watched_tokens(Path(path))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles one ASGI connection."""
        if scope["type"] == "websocket" or (scope["type"] == "http" and scope["path"] not in OPEN_PATHS):
            given = bearer_token(Headers(scope=scope).get("authorization")).encode()
            if not await self._is_allowed(given):
                await JSONResponse({"error": "a valid bearer token is required"}, status_code=401)(scope, receive, send)
                return
            if scope["path"] == CALLS_PATH:
                scope[STILL_ALLOWED] = partial(self._is_allowed, given)
        await self._app(scope, receive, send)

    async def _is_allowed(self, given: bytes) -> bool:
        if self._tokens.due:
            await asyncio.to_thread(self._tokens.refresh)
        return any(secrets.compare_digest(given, each.encode()) for each in self._tokens.value)
