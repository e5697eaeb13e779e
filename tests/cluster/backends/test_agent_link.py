"""`cluster.backends.agent_link` against an agent that is slow, as one on a busy machine is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import zmq
import zmq.asyncio

from cluster.agent import protocol
from cluster.agent.frames import pack, unpack
from cluster.agent.settings import AgentEndpoint
from cluster.backends import agent_link
from cluster.backends.agent_link import AgentLink, Identity, Listener
from cluster.backends.base import WorkerOrder

WORKERS = 6 * agent_link.CREATIONS_AT_ONCE


class SlowAgent:
    """Answers creations some time after no other came."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self.together: list[int] = []
        """How many creations waited for an answer, at each answer."""

    async def serve(self) -> None:
        waiting: dict[int, Any] = {}
        while True:
            if await self._socket.poll(300):
                peer, data = await self._socket.recv_multipart()
                message = unpack(data)
                if message["kind"] == protocol.HELLO:
                    welcome = {"kind": protocol.WELCOME, "agent": "a1", "workers": [], "reports": 0, "ending": ""}
                    await self._socket.send_multipart([peer, pack(welcome)])
                elif message["kind"] == protocol.CREATE:
                    waiting[message["id"]] = peer
                continue
            if waiting:
                self.together.append(len(waiting))
            for number, peer in waiting.items():
                await self._socket.send_multipart([peer, pack({"kind": protocol.DONE, "id": number})])
            waiting.clear()


@pytest.mark.slow
async def test_creations_are_few_at_a_time_and_each_has_the_whole_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_link, "COMMAND_SECONDS", 1.2)  # all together take longer than one may
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        agent = SlowAgent(router)
        serving = asyncio.create_task(agent.serve())
        endpoint = AgentEndpoint(agent="a1", node="node-0", pid=1, started=0.0, address=f"tcp://127.0.0.1:{port}")
        link = AgentLink(context, endpoint, Identity("job", 1, 60.0), Listener(), lambda: 0.0)
        await link.connect()
        orders = [WorkerOrder(f"worker-{rank}", 1, "b", ("true",), {}, "log") for rank in range(WORKERS)]
        async with asyncio.timeout(60):
            await asyncio.gather(*map(link.create, orders))
        assert sum(agent.together) == WORKERS
        assert max(agent.together) <= agent_link.CREATIONS_AT_ONCE
        serving.cancel()
        await link.close()
