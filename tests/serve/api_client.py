"""The API in this process: `async with api(directory) as client: status, answer = await client.get("/jobs")`."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer

from counterpoint.serve.access import Tokens
from counterpoint.serve.app import ENDPOINTS, Access, build_app
from counterpoint.serve.audit import AuditLog
from counterpoint.serve.endpoint import ROOT, Endpoint
from counterpoint.serve.jobs import Jobs
from counterpoint.serve.origin import own_names

ADMIN, READ = "admin-token-of-the-tests", "read-token-of-the-tests"
PATIENT = tuple(replace(each, seconds=max(each.seconds, 120.0)) for each in ENDPOINTS)
"""The page's endpoints. Ten seconds may be too short for an answer of a machine on which much else runs."""

TOKENS = Tokens(*(hashlib.sha256(token.encode()).digest() for token in (ADMIN, READ)))


@dataclass(frozen=True, slots=True)
class Client:
    """A caller with both tokens."""

    http: TestClient[Any, Any]

    async def request(
        self, method: str, path: str, token: str | None = ADMIN, headers: Mapping[str, str] = {}, **arguments: Any
    ) -> ClientResponse:
        """Any request; `path` is whole."""
        credentials = {} if token is None else {"Authorization": f"Bearer {token}"}
        return await self.http.request(method, path, headers={**credentials, **headers}, **arguments)

    async def get(self, path: str, **query: Any) -> tuple[int, Any]:
        """Status and JSON of a reading request, `path` below the API's root."""
        response = await self.request("GET", ROOT + path, READ, params=query)
        return response.status, await response.json()

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """Status and JSON of a changing request, `path` below the API's root."""
        response = await self.request("POST", ROOT + path, json=body)
        return response.status, await response.json()


def app_of(
    *directories: Path, endpoints: tuple[Endpoint[Any, Any], ...] = PATIENT, requests_per_second: float = 1e6
) -> web.Application:
    """The application for these directories, with its state beside the first."""
    access = Access(TOKENS, own_names("127.0.0.1", ()), requests_per_second, changes_per_minute=1e6)
    return build_app(
        Jobs(directories), access, AuditLog(directories[0].parent / f"{directories[0].name}.state"), endpoints
    )


@asynccontextmanager
async def api(
    *directories: Path,
    endpoints: tuple[Endpoint[Any, Any], ...] = PATIENT,
    requests_per_second: float = 1e6,
) -> AsyncIterator[Client]:
    """Serves the directories on a free port."""
    app = app_of(*directories, endpoints=endpoints, requests_per_second=requests_per_second)
    async with TestClient(TestServer(app)) as http:
        yield Client(http)
