"""Connections to a host that is gone: the kernel is told to notice it, on every connection to a server."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from counterpoint.inference.base import ServerUnreachable
from counterpoint.inference.clients import binary_http, http_sessions, weight_sender
from counterpoint.inference.clients.http_sessions import HttpSessions, call
from counterpoint.inference.clients.lost_peers import ConnectedSocket, notice_loss
from counterpoint.inference.config import PoolConfig
from counterpoint.transport.files.atomic import STABLE
from tests.support.fake_inference import CLAIM, FakeServer, weight_update
from tests.support.partition import Namespace, lack_of_namespaces, open_listener


async def test_every_connection_to_a_server_notices_its_loss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: dict[str, int] = {}
    for module in (binary_http, http_sessions, weight_sender):

        def noted(connected: ConnectedSocket, name: str = module.__name__) -> None:
            notice_loss(connected)
            assert hasattr(connected, "getsockopt")
            found[name] = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

        monkeypatch.setattr(module, "notice_loss", noted)
    (tmp_path / STABLE).touch()
    (tmp_path / "model.safetensors").write_bytes(b"x")
    async with FakeServer() as server, HttpSessions(PoolConfig(send_weights=True)) as sessions:
        await call(sessions.admin, f"{server.url}/counterpoint/v1/status", None)
        with pytest.raises(Exception, match="500"):  # it is no model call; only the connection counts
            await sessions.binary_client(server.url).post("/counterpoint/v1/generate", b"{}", "application/msgpack")
        update = weight_update(1)
        sender = sessions.weight_sender(server.url)
        assert sender is not None
        await sender.send(type(update)(1, tmp_path, update.probe, None), CLAIM)
    assert found == dict.fromkeys((each.__name__ for each in (binary_http, http_sessions, weight_sender)), 30_000)


@pytest.mark.slow
@pytest.mark.skipif(
    bool(lack_of_namespaces()), reason=f"{lack_of_namespaces()}; a proxy's kernel acknowledges what it holds"
)
async def test_bytes_that_nobody_acknowledges_end_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.inference.clients.lost_peers.LOST_SECONDS", 1)
    peer = Namespace()
    try:
        async with HttpSessions(PoolConfig()) as sessions:
            server, listener = FakeServer(), peer.run(lambda: open_listener(peer.host))
            await server.listen(0, listener)
            url = f"http://{peer.host}:{listener.getsockname()[1]}"
            await call(sessions.admin, f"{url}/counterpoint/v1/status", None)
            peer.cut()
            async with asyncio.timeout(60):
                with pytest.raises(ServerUnreachable):
                    await call(sessions.admin, f"{url}/counterpoint/v1/status", None)
            peer.heal()
            await server.vanish()
    finally:
        peer.close()
