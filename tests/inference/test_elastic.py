"""A pool whose servers come, go and are drained while it works, against fake servers on real sockets."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from counterpoint.inference import wire
from counterpoint.inference.base import InferenceError
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.pool.pool import InferencePool, Served
from tests.inference.pool.test_pool import generate, pool_of, until_states
from tests.support.fake_inference import FakeServer, weight_update
from tests.support.polling import until


class Listing:
    """A watched file of servers, replaced by renames."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, *lines: str) -> None:
        beside = self.path.with_suffix(".new")
        beside.write_text("\n".join(lines))
        os.replace(beside, self.path)


@pytest.fixture
def listing(tmp_path: Path) -> Listing:
    return Listing(tmp_path / "servers")


@asynccontextmanager
async def pool_by(listing: Listing, **settings: Any) -> AsyncIterator[Served]:
    defaults = {"health_interval_seconds": 0.02, "startup_timeout_seconds": 60, "request_timeout_seconds": 60}
    pool = InferencePool(PoolConfig(urls_file=listing.path, **(defaults | settings))).model("a-model")
    try:
        await pool.start()
        yield pool
    finally:
        await pool.release()


async def test_a_new_server_gets_the_current_weights_and_their_proof_before_its_first_request(listing: Listing) -> None:
    async with FakeServer() as old, FakeServer() as new:
        listing.write(old.url)
        async with pool_by(listing) as pool:
            await pool.update(weight_update(7, "a-model"))
            new.probe_gate.clear()
            listing.write(old.url, new.url)
            await until(lambda: new.answers[wire.PROBE_PATH] == 1, "the probe")
            turns = [await generate(pool, str(index)) for index in range(4)]
            assert {turn.server for turn in turns} == {old.url}
            new.probe_gate.set()
            await until_states(pool, "serving", "serving")
            old.gate.clear()
            held = asyncio.create_task(generate(pool, "x"))
            await until(lambda: pool.status()[0].in_flight == 1, "a request in flight")
            turn = await generate(pool, "y")
            assert (turn.server, turn.policy_version, new.adapters["a-model"]) == (new.url, 7, 7)
            old.gate.set()
            await held


async def test_a_server_whose_line_is_gone_ends_what_it_has_and_is_forgotten(listing: Listing) -> None:
    async with FakeServer() as leaving, FakeServer() as staying:
        listing.write(leaving.url, staying.url)
        told: list[int] = []
        async with pool_by(listing, capacity="fixed", max_concurrent_requests_per_server=8) as pool:
            pool.on_capacity = told.append
            await until_states(pool, "serving", "serving")
            leaving.gate.clear()
            request = asyncio.create_task(generate(pool))
            await leaving.arrived.wait()
            listing.write(staying.url)
            await until_states(pool, "draining", "serving")
            assert told[-1] == 8
            assert {(await generate(pool, "a")).server for _ in range(4)} == {staying.url}, "its prefix or not"
            leaving.gate.set()
            assert (await request).server == leaving.url
            await until(lambda: [status.url for status in pool.status()] == [staying.url], "the other to be gone")
            listing.write(staying.url, leaving.url)
            await until_states(pool, "serving", "serving")
    assert leaving.answers[wire.GENERATE_PATH] == 1


async def test_a_drained_server_still_loads_weights_and_serves_again_when_told_to(listing: Listing) -> None:
    async with FakeServer() as first, FakeServer() as second:
        listing.write(f"drain {first.url}", second.url)
        async with pool_by(listing) as pool:
            await pool.update(weight_update(3))
            await until_states(pool, "draining", "serving")
            assert pool.status()[0].reason == "its line in urls_file begins with drain"
            assert {(await generate(pool, str(index))).server for index in range(4)} == {second.url}
            listing.write(first.url, f"drain {second.url}")
            await until_states(pool, "serving", "draining")
            turn = await generate(pool)
            assert (turn.server, turn.policy_version) == (first.url, 3)


async def test_a_server_can_say_itself_that_it_is_to_be_drained() -> None:
    async with FakeServer() as asked, FakeServer() as other, pool_of(asked, other) as pool:
        await until_states(pool, "serving", "serving")
        asked.gate.clear()
        request = asyncio.create_task(generate(pool))
        await asked.arrived.wait()
        asked.draining = True
        await until_states(pool, "draining", "serving")
        assert pool.status()[0].reason == "it was told to drain"
        assert (await generate(pool, "b")).server == other.url
        asked.gate.set()
        assert (await request).server == asked.url, "what it had, it finished"
        asked.draining = False
        await until_states(pool, "serving", "serving")


async def test_a_drained_server_that_dies_gives_its_requests_to_another(listing: Listing) -> None:
    async with FakeServer() as dying, FakeServer() as other:
        listing.write(dying.url, other.url)
        async with pool_by(listing) as pool:
            await until_states(pool, "serving", "serving")
            dying.gate.clear()
            request = asyncio.create_task(generate(pool))
            await dying.arrived.wait()
            listing.write(other.url)
            await until_states(pool, "draining", "serving")
            await dying.vanish()
            assert (await request).server == other.url
            await until(lambda: [status.url for status in pool.status()] == [other.url], "the other to be gone")


async def test_servers_that_come_and_go_during_an_update_do_not_hold_it_up(listing: Listing) -> None:
    async with FakeServer() as slow, FakeServer() as other, FakeServer() as new:
        listing.write(slow.url, other.url)
        async with pool_by(listing) as pool:
            await until_states(pool, "serving", "serving")
            slow.load_gate.clear()
            update = asyncio.create_task(pool.update(weight_update(1)))
            await until(lambda: other.version == 1, "version 1")
            listing.write(other.url, new.url)
            await update
            assert new.version == 1
            assert [status.url for status in pool.status()] == [other.url, new.url]
            slow.load_gate.set()


async def test_a_job_may_start_before_there_is_any_server(listing: Listing) -> None:
    async with FakeServer() as server:
        pool = InferencePool(
            PoolConfig(urls_file=listing.path, health_interval_seconds=0.02, startup_timeout_seconds=60)
        ).model("a-model")
        start = asyncio.create_task(pool.start())
        await asyncio.sleep(0.05)
        assert not start.done()
        listing.write(server.url)
        await start
        await pool.release()
        with pytest.raises(InferenceError, match="closed"):
            await generate(pool)


async def test_no_known_server_is_an_error_that_names_the_source(listing: Listing) -> None:
    pool = InferencePool(PoolConfig(urls_file=listing.path, startup_timeout_seconds=0.05)).model("a-model")
    with pytest.raises(InferenceError, match=rf"no server is known: {listing.path}; .*No such file"):
        await pool.start()
    await pool.release()


async def test_a_run_unloads_its_adapter_at_its_end_and_full_weights_stay() -> None:
    async with FakeServer() as first, FakeServer() as second:
        async with pool_of(first, second) as pool:
            await pool.update(weight_update(1, "a-model"))
        assert first.unloaded == second.unloaded == ["a-model"]
        async with pool_of(first) as pool:
            await pool.update(weight_update(2))
        assert first.unloaded == ["a-model"]


async def test_a_server_that_is_gone_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.inference.pool.holder.UNLOAD_SECONDS", 0.05)
    async with FakeServer() as gone, FakeServer() as hanging:
        async with pool_of(gone, hanging) as pool:
            await pool.update(weight_update(1, "a-model"))
            await gone.vanish()
            hanging.unload_gate.clear()
        assert gone.unloaded == hanging.unloaded == []
        hanging.unload_gate.set()


def metrics(running: int, waiting: int) -> str:
    return (
        f'\nvllm:num_requests_running{{engine="0"}} {running}\nvllm:num_requests_waiting{{engine="0"}} {waiting}\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:num_preemptions_total{engine="0"} 0\n'
    )


async def test_the_capacity_follows_the_load_that_a_server_tells() -> None:
    told: list[int] = []
    async with FakeServer() as server:
        server.metrics = metrics(running=10, waiting=0)
        config = PoolConfig(urls=[server.url], max_concurrent_requests_per_server=64, health_interval_seconds=0.01)
        pool = InferencePool(config).model("a-model", told.append)
        await pool.start()
        await until(lambda: told[-1] == 64, "a capacity of 64")
        assert told == [32, 40, 48, 56, 64]
        server.metrics = metrics(running=10, waiting=100)
        await until(lambda: told[-1] == 4, "a capacity of 4")
        assert told[5:8] == [48, 36, 27]
        server.gate.clear()
        requests = [asyncio.create_task(generate(pool, str(index))) for index in range(12)]
        await until(lambda: server.running == 4, "4 running requests")
        server.metrics = metrics(running=10, waiting=0)
        await until(lambda: server.running == 12, "12 running requests")
        server.gate.set()
        await asyncio.gather(*requests)
        assert pool.status()[0].cap == told[-1]
        await pool.release()


async def test_a_server_that_does_not_tell_its_load_keeps_the_fixed_cap() -> None:
    async with FakeServer() as server, pool_of(server, max_concurrent_requests_per_server=64) as pool:
        await until(lambda: server.answers["/counterpoint/v1/status"] > 3, "three more looks")
        assert pool.status()[0].cap == 64
    async with FakeServer() as server:
        server.metrics = metrics(running=10, waiting=100)
        async with pool_of(server, max_concurrent_requests_per_server=64, capacity="fixed") as pool:
            await until(lambda: server.answers["/counterpoint/v1/status"] > 3, "three more looks")
            assert pool.status()[0].cap == 64
        assert server.answers["/metrics"] == 0


async def test_an_adapter_that_the_requests_do_not_name_is_refused() -> None:
    async with FakeServer() as server, pool_of(server) as pool:
        with pytest.raises(ValueError, match=r"'other'.*'a-model'"):
            await pool.update(weight_update(1, "other"))
