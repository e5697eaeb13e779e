"""Messages to an engine go out in their order, at the end of a turn of the loop, whatever becomes of who sent them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from counterpoint.inference.plugin.engine.sending import SendsTogether


class Client:
    """Stands for vLLM's client of an engine: the first message of a turn is sent at once, others when `sent` is set."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.fault: Exception | None = None
        self.dead = False
        self.pending: list[asyncio.Future[Any]] = []

    def ensure_alive(self) -> None:
        if self.dead:
            raise RuntimeError("dead")

    def _send_input_message(self, message: str, engine: str) -> asyncio.Future[Any]:
        self.ensure_alive()
        self.messages.append(f"{message} to {engine}")
        future = asyncio.get_running_loop().create_future()
        if self.fault is not None:
            future.set_exception(self.fault)
        elif message == "slow":
            self.pending.append(future)
        else:
            future.set_result(None)
        return future


async def test_messages_of_a_turn_go_out_together_and_in_order() -> None:
    client = Client()
    send = SendsTogether(client)

    async def ask(message: str) -> None:
        await send(message, "0")

    asking = [asyncio.create_task(ask(message)) for message in ("a", "slow", "b")]
    await asyncio.sleep(0)
    assert client.messages == []
    asking[0].cancel()
    await asyncio.sleep(0)
    assert client.messages == ["a to 0", "slow to 0", "b to 0"], "also that of a caller which was cancelled"
    await asking[2]
    assert not asking[1].done()
    client.pending[0].set_result(None)
    await asking[1]
    await ask("c")
    assert client.messages[3:] == ["c to 0"]


async def test_a_caller_hears_that_its_message_was_not_sent() -> None:
    client = Client()
    send = SendsTogether(client)
    client.fault = OSError(5, "Input/output error")
    with pytest.raises(OSError, match="Input/output"):
        await send("a", "0")
    client.fault = None
    sent = send("b", "0")
    client.dead = True  # before the turn ends
    with pytest.raises(RuntimeError, match="dead"):
        await sent
    with pytest.raises(RuntimeError, match="dead"):
        send("c", "0")
