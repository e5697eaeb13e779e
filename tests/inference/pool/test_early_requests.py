"""Requests begin while servers load: nothing is answered before the proof, and an answer says itself which version made it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from counterpoint.inference.base import InferenceError, SamplingParameters
from counterpoint.inference.clients.client import BinaryClient
from counterpoint.inference.clients.http_sessions import HttpSessions
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.pool import pool as pool_module
from counterpoint.inference.pool.pool import InferencePool, Served
from counterpoint.transport.records import Turn
from tests.support.fake_inference import CLAIM, FakeServer, weight_update
from tests.support.polling import until

SAMPLING = SamplingParameters(temperature=0.7, max_tokens=3)
PROMPT = np.array([7, 8, 9], dtype=np.int32)


@asynccontextmanager
async def loading(*servers: FakeServer, deaf: bool = False) -> AsyncIterator[tuple[Served, asyncio.Task[None]]]:
    """A pool whose servers hold version 1 and have begun to load version 2, so that requests may begin."""
    config = PoolConfig(urls=[each.url for each in servers], health_interval_seconds=3600, request_timeout_seconds=60)
    pool, begun = InferencePool(config).model("a-model"), asyncio.Event()
    try:
        await pool.start()
        await pool.update(weight_update(1))
        for each in servers:
            each.rest_of_load, each.deaf = asyncio.Event(), deaf
        updating = asyncio.create_task(pool.update(weight_update(2), begun.set))
        await asyncio.wait_for(begun.wait(), 60)
        yield pool, updating
    finally:
        await pool.release()


def ask(pool: Served, affinity: str = "a") -> asyncio.Task[Turn]:
    return asyncio.create_task(pool.generate(PROMPT, SAMPLING, affinity=affinity))


def end_load(server: FakeServer) -> None:
    assert server.rest_of_load is not None
    server.rest_of_load.set()


async def test_a_load_is_heard_to_its_end_though_nobody_asks_when_it_begins() -> None:
    """The server begins its answer before it knows how long it is, whoever asks."""
    async with FakeServer() as server, HttpSessions(PoolConfig()) as connections:
        server.rest_of_load = asyncio.Event()
        server.rest_of_load.set()
        await BinaryClient(server.url, connections).load(weight_update(1), CLAIM)
        assert server.versions == [1]


async def test_an_answer_that_was_computed_during_the_load_waits_for_the_proof() -> None:
    async with FakeServer() as server, loading(server) as (pool, updating):
        server.probe_gate.clear()
        asking = ask(pool)
        await until(lambda: server.completions == 1, "the server's answer")
        assert not updating.done()
        end_load(server)
        await until(lambda: server.answers["/counterpoint/v1/probe"] == 2, "the probe")
        assert not asking.done()
        server.probe_gate.set()
        assert (await asking).policy_version == 2
        await updating


async def test_the_version_of_an_answer_is_that_of_the_load_which_it_names() -> None:
    async with FakeServer() as server, loading(server) as (pool, updating):
        server.begins_too_early = True  # for the update after this one
        end_load(server)
        await updating
        server.rest_of_load, begun = asyncio.Event(), asyncio.Event()
        updating = asyncio.create_task(pool.update(weight_update(3), begun.set))
        await begun.wait()
        asking = ask(pool)
        await until(lambda: server.completions == 1, "the server's answer")
        end_load(server)
        assert (await asking).policy_version == 2, "its load was not that of version 3"
        await updating
        assert (await ask(pool)).policy_version == 3


async def test_what_was_sent_to_a_server_that_dies_while_it_loads_goes_to_another() -> None:
    async with FakeServer() as dying, FakeServer() as other, loading(dying, other) as (pool, updating):
        dying.gate.clear()
        asked = [ask(pool, f"{group}-0") for group in range(4)]
        await until(lambda: bool(dying.asked and other.asked), "requests at both")
        await dying.vanish()
        end_load(other)
        turns = await asyncio.gather(*asked)
        assert {(turn.server, turn.policy_version) for turn in turns} == {(other.url, 2)}
        await updating


async def test_a_load_that_takes_long_after_it_began_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "LATE_SECONDS", 0.05)
    async with FakeServer() as server, loading(server) as (pool, updating):
        asking = ask(pool)
        await asyncio.sleep(0.2)
        assert not updating.done()
        assert not asking.done()
        assert len(server.asked) == 1, "it was not asked again"
        end_load(server)
        assert (await asking).policy_version == 2
        await updating


async def test_nothing_of_a_server_that_computes_with_other_weights_is_answered() -> None:
    async with FakeServer() as server, loading(server, deaf=True) as (pool, updating):
        asking = ask(pool)
        await until(lambda: server.completions == 1, "the server's answer")
        end_load(server)
        with pytest.raises(InferenceError, match="computes with other weights"):
            await updating
        assert not asking.done()
        server.deaf, server.rest_of_load = False, None
        await pool.update(weight_update(3))
        assert (await asking).policy_version == 3


@pytest.mark.parametrize("proves", [False, True])
async def test_a_server_that_is_late_gets_no_request_until_it_serves(
    proves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "LATE_SECONDS", 0.05)
    async with FakeServer() as late, FakeServer() as other, loading(late, other) as (pool, updating):
        late.probe_gate.clear()
        end_load(other)
        if proves:
            end_load(late)
            await until(lambda: late.answers["/counterpoint/v1/probe"] == 2, "the probe of the late one")
        await updating
        turns = await asyncio.gather(*(ask(pool, f"{group}-0") for group in range(8)))
        assert {turn.server for turn in turns} == {other.url}
        assert pool.meters.retries == 0, "the late one was asked"
        end_load(late)
        late.probe_gate.set()
        await until(lambda: [each.state for each in pool.status()] == ["serving"] * 2, "the late one, proven")
        turns = await asyncio.gather(*(ask(pool, f"{group}-1") for group in range(8, 24)))
        assert {(turn.server, turn.policy_version) for turn in turns} == {(late.url, 2), (other.url, 2)}
        assert pool.meters.retries == 0
