"""The bearer token on every route of a server that listens beyond loopback.

vLLM's own check (0.30) guards paths below `/v1`, `/v2`, `/inference` and `/cohere`, and leaves open all others, ours among
them. This is added by vLLM's `--middleware` and leaves open only `/health` and `/metrics`, which say nothing about a
request.
"""

from __future__ import annotations

import secrets
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from vllm import envs

OPEN_PATHS = frozenset({"/health", "/metrics"})


class RequireToken:
    """ASGI middleware: answers 401 without `Authorization: Bearer <VLLM_API_KEY>`."""

    def __init__(self, app: Any) -> None:
        if not envs.VLLM_API_KEY:
            raise ValueError("VLLM_API_KEY is not set: there is no token to require")
        self._app = app
        self._expected = f"Bearer {envs.VLLM_API_KEY}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles one ASGI connection."""
        guarded = scope["type"] == "websocket" or (scope["type"] == "http" and scope["path"] not in OPEN_PATHS)
        if guarded and not self._allowed(scope):
            await JSONResponse({"error": "a valid bearer token is required"}, status_code=401)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, scope: Any) -> bool:
        given = Headers(scope=scope).get("authorization", "")
        return secrets.compare_digest(given.encode(), self._expected)
