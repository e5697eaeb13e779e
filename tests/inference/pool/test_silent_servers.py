"""Servers that are cut off, or answer nothing: whatever they were doing, they go out of service, and the others go on."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from counterpoint.inference.base import InferenceError, RequestRefused
from tests.inference.pool.test_pool import PROMPT, generate, pool_of, states, until_states
from tests.support.fake_inference import FakeServer, weight_update
from tests.support.partition import KINDS, Peer, open_listener, peer_by
from tests.support.polling import until


@pytest.fixture(params=sorted(KINDS))
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    """Another host, by a namespace where this machine makes one, and by a proxy everywhere."""
    with peer_by(request.param) as peer:
        yield peer


@asynccontextmanager
async def server_at(peer: Peer) -> AsyncIterator[FakeServer]:
    server = FakeServer()
    listener: socket.socket = peer.run(lambda: open_listener(peer.host))
    await server.listen(0, listener)
    host, port = peer.reach(listener.getsockname()[1])
    server.url = f"http://{host}:{port}"
    yield server
    await server.vanish()


@pytest.mark.slow
async def test_an_update_goes_on_without_a_server_that_is_cut_off_in_its_middle(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("counterpoint.inference.pool.liveness.SILENT_SECONDS", 1.0)
    async with server_at(peer) as far, FakeServer() as near, pool_of(far, near, max_retries=9) as pool:
        await pool.update(weight_update(1))
        far.load_gate.clear()
        update = asyncio.create_task(pool.update(weight_update(2)))
        await until(lambda: states(pool) == ["loading", "serving"] and near.version == 2, "a load at the far server")
        peer.cut()
        async with asyncio.timeout(60):
            await update
        assert states(pool) == ["out", "serving"]
        reason = pool.status()[0].reason
        assert "no health check was answered for 1 s" in reason
        assert "version 2" in reason
        assert (await generate(pool)).policy_version == 2
        peer.heal()
        far.load_gate.set()
        await until_states(pool, "serving", "serving")
        assert far.version == 2


async def test_an_update_goes_on_without_a_server_that_takes_much_longer_than_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("counterpoint.inference.pool.pool.LATE_SECONDS", 0.1)
    async with FakeServer() as late, FakeServer() as good, pool_of(late, good) as pool:
        await until_states(pool, "serving", "serving")
        late.gate.clear()
        asked = asyncio.create_task(generate(pool))
        await late.arrived.wait()
        late.load_gate.clear()
        async with asyncio.timeout(60):
            await pool.update(weight_update(1))
            assert (await asked).server == good.url
            assert states(pool) == ["loading", "serving"]
            assert pool.fleet()["capacity"] == pool.fleet()["servers"][1]["limit"]
            await pool.update(weight_update(2))  # nor does the next one wait
        late.load_gate.set()
        await until(lambda: late.version == 2, "the newest weights at the late server")
        await until_states(pool, "serving", "serving")
        assert late.versions == [1, 2]


def idle_metrics(running: int = 0, tokens: int = 0) -> str:
    """What a vLLM reports that has so many requests and has generated so many tokens."""
    values = {"num_requests_running": running, "num_requests_waiting": 0, "kv_cache_usage_perc": 0.1}
    values |= {"prompt_tokens_total": 7, "generation_tokens_total": tokens}
    return "\n" + "".join(f'vllm:{name}{{engine="0"}} {value}\n' for name, value in values.items())


@pytest.mark.parametrize("capacity", ["adaptive", "fixed"])
async def test_a_server_that_answers_health_checks_and_no_request_is_out_until_it_answers_one(
    capacity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("counterpoint.inference.pool.progress.ABSENT_SECONDS", 0.1)
    monkeypatch.setattr("counterpoint.inference.pool.liveness.SILENT_SECONDS", 0.1)
    async with FakeServer() as mute, FakeServer() as good, pool_of(mute, good, capacity=capacity) as pool:
        await until_states(pool, "serving", "serving")
        mute.gate.clear()
        mute.metrics = good.metrics = idle_metrics()
        async with asyncio.timeout(60):
            turn = await generate(pool)
        assert turn.server == good.url
        assert (pool.status()[0].state, pool.status()[1].state) != ("serving", "serving")
        await until(lambda: "one token" in pool.status()[0].reason, "a request for a token without an answer")
        async with asyncio.timeout(60):
            await pool.update(weight_update(1))  # it is not waited for
        assert not mute.versions
        mute.gate.set()
        await until_states(pool, "serving", "serving")
        assert mute.versions == [1]


@pytest.mark.slow
async def test_a_server_that_computes_may_take_its_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("counterpoint.inference.pool.progress.ABSENT_SECONDS", 1.5)
    monkeypatch.setattr("counterpoint.inference.pool.progress.STUCK_SECONDS", 1.5)
    async with FakeServer() as slow, pool_of(slow) as pool:
        await until_states(pool, "serving")
        slow.gate.clear()
        asked = asyncio.create_task(generate(pool))
        for tokens in range(300):
            slow.metrics = idle_metrics(1, tokens)
            await asyncio.sleep(0.01)
        assert states(pool) == ["serving"]
        await until(lambda: "its engine computed no token" in caplog.text, "an engine that is noticed to be stuck")
        slow.gate.set()
        await asked


@pytest.mark.parametrize("status", [400, 403, 405, 413])
async def test_a_server_that_refuses_everything_but_health_checks_is_out(status: int) -> None:
    """It refuses at once, so that it would draw nearly all requests of a run, and fail them."""
    async with FakeServer() as bad, FakeServer() as good, pool_of(bad, good, health_interval_seconds=60) as pool:
        await until_states(pool, "serving", "serving")
        bad.generate_status = status
        bad.score_status = lambda _asked: status
        found: list[Any] = []
        for number in range(16):
            found += await asyncio.gather(pool.score(PROMPT, 1, affinity=str(number)), return_exceptions=True)
        assert states(pool) == ["out", "serving"]
        assert sum(isinstance(each, RequestRefused) for each in found) == 2, "the third one goes to the other server"
        assert sum(isinstance(each, np.ndarray) for each in found) == 14


@pytest.mark.slow
async def test_a_server_that_computes_for_others_may_leave_a_doubt_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one with as many requests as it takes at once, whose completions are long: they would all be cancelled."""
    monkeypatch.setattr("counterpoint.inference.pool.liveness.SILENT_SECONDS", 1.0)  # it computes before
    async with FakeServer() as busy, pool_of(busy, health_interval_seconds=60) as pool:
        busy.gate.clear()
        busy.metrics = idle_metrics(1, 0)
        in_flight = asyncio.create_task(generate(pool))
        await busy.arrived.wait()
        busy.score_status = lambda _asked: 500
        failing = asyncio.create_task(pool.score(PROMPT, 1, affinity="b"))
        await until(lambda: len(busy.asked) == 2, "the request for one token")
        busy.metrics = idle_metrics(1, 9)
        with pytest.raises(InferenceError, match="500"):
            await failing
        assert states(pool) == ["serving"]
        busy.gate.set()
        assert (await in_flight).server == busy.url
