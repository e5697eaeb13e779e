"""A lack of descriptors on this machine is no failure of the server that was to be asked."""

from __future__ import annotations

import asyncio
import errno

import pytest

from counterpoint.inference.base import InferenceError, ServerUnreachable
from counterpoint.inference.clients.http_sessions import HttpSessions
from counterpoint.inference.config import PoolConfig


@pytest.mark.parametrize(
    ("code", "unreachable"), [(errno.EMFILE, False), (errno.ENFILE, False), (errno.ECONNREFUSED, True)]
)
async def test_a_connection_without_a_descriptor_does_not_count_against_the_server(
    code: int, unreachable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise OSError(code, "no")

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", refuse)
    url = "http://127.0.0.1:9"
    async with HttpSessions(PoolConfig(urls=[url])) as sessions:
        with pytest.raises(InferenceError, match=url) as failed:
            await sessions.binary_client(url).post("/x", b"", "application/json")
    assert isinstance(failed.value, ServerUnreachable) is unreachable
