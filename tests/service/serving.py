"""A service without trainer and servers, for tests of what it does by itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from counterpoint.environments.chat import Chat
from counterpoint.service.config import ServiceConfig
from counterpoint.service.keys import digest
from counterpoint.service.records.store import RecordStore
from counterpoint.service.samplers import Samplers
from counterpoint.service.tinker.app import Endpoints
from counterpoint.service.tinker.service import Service
from counterpoint.transport.wires.open import open_connection

KEYS = [f"tml-{letter * 20}" for letter in "ab"]
NAMES = ["anna", ""]


@asynccontextmanager
async def serving(
    directory: Path,
    samplers: object = None,
    chat: Chat | None = None,
    *,
    has_experts: bool = False,
    **values: Any,
) -> AsyncIterator[tuple[Any, Service]]:
    """A client of the service, and the service."""
    config = ServiceConfig(output_dir=directory, model="m", name="tiny", **values)
    connection = open_connection(config.transport, directory)
    keys, store = dict(zip(map(digest, KEYS), NAMES, strict=True)), RecordStore(directory / "service")
    service = Service(config, store, connection, cast(Samplers, samplers), None, keys, chat, has_experts=has_experts)
    app = Endpoints(service, keys).app()
    app.on_response_prepare.append(_close)
    server = TestServer(app)
    await server.start_server(auto_decompress=False)  # as the service's own listener
    async with TestClient(server) as client:
        yield client, service
    await service.close()


async def _close(_: web.Request, response: web.StreamResponse) -> None:
    """Ends the connection after each answer: the SDK leaves some open."""
    response.headers["Connection"] = "close"
    response.force_close()
