"""Health checks while a server loads: what a server does not answer counts, not what this process sleeps."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest

from counterpoint.inference.clients.client import ServerClient
from counterpoint.inference.pool import liveness
from tests.support.polling import until


class Client:
    """Answers health checks."""

    url = "http://server"
    checks = 0

    async def identify(self) -> Any:
        """See `ServerClient`."""
        self.checks += 1
        await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_a_pause_of_this_process_is_no_silence_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "SILENT_SECONDS", 0.4)
    client, lost = Client(), list[str]()
    async with asyncio.timeout(60) as loading:
        async with liveness.watched(cast(ServerClient, client), 0.05, loading, lost.append):
            await until(lambda: client.checks >= 2, "health checks")
            time.sleep(0.6)  # noqa: ASYNC251 - as a debugger stops it
            seen = client.checks
            await until(lambda: client.checks >= seen + 3, "further ones")
            assert lost == []
