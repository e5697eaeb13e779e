"""Many names of weights at one pool: one health check a server, one cap for all, and what befalls one name befalls no other."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest

from counterpoint.inference.base import InferenceError, SamplingParameters
from counterpoint.inference.clients.client import BinaryClient
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.identity import STATUS_PATH
from counterpoint.inference.pool.fleet import Fleet
from counterpoint.inference.pool.held import Held
from counterpoint.inference.pool.pool import InferencePool, Served
from counterpoint.inference.pool.server_monitor import ServerMonitor
from counterpoint.inference.pool.servers import CHECKS_PER_TICK
from counterpoint.transport.records import Turn
from tests.support.fake_inference import FakeServer, weight_update
from tests.support.polling import until

SAMPLING = SamplingParameters(temperature=0.7, max_tokens=3)
PROMPT = np.array([7, 8, 9], dtype=np.int32)


def pool_at(*servers: FakeServer, **settings: Any) -> InferencePool:
    given = {"health_interval_seconds": 3600, "startup_timeout_seconds": 60, "request_timeout_seconds": 60} | settings
    return InferencePool(PoolConfig(urls=[server.url for server in servers], **given))


@asynccontextmanager
async def started(*names: Served) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for served in names:
            stack.push_async_callback(served.release)
            await served.start()
            every = served.status
            await until(lambda every=every: {each.state for each in every()} == {"serving"}, "all servers")  # type: ignore[misc]
        yield


async def generate(served: Served, affinity: str = "a") -> Turn:
    return await served.generate(PROMPT, SAMPLING, affinity=affinity)


@pytest.mark.slow
async def test_sixty_four_names_at_four_servers_are_four_health_checks() -> None:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(FakeServer()) for _ in range(4)]
        pool = pool_at(*servers)
        names = [pool.model(f"name-{number}") for number in range(64)]
        await stack.enter_async_context(started(*names))
        await asyncio.gather(
            *(served.update(weight_update(number, f"name-{number}")) for number, served in enumerate(names))
        )
        turns = await asyncio.gather(*(generate(served, str(number)) for number, served in enumerate(names)))
        assert [turn.policy_version for turn in turns] == list(range(64))
        assert [turn.completion_ids.tolist() for turn in turns] == [[number] * 3 for number in range(64)]
        before = [server.answers[STATUS_PATH] for server in servers]
        for monitor in pool._monitors.values():
            monitor.check_now()
        await until(
            lambda: all(server.answers[STATUS_PATH] > was for server, was in zip(servers, before, strict=True)),
            "checks",
        )
        assert [server.answers[STATUS_PATH] for server in servers] == [was + 1 for was in before]
    assert all(sorted(server.unloaded) == sorted(f"name-{number}" for number in range(64)) for server in servers)


async def test_what_changes_nothing_is_not_counted_out_for_each_name_and_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A check that finds what the last one found is told to no name, and an update of servers that serve leaves the capacity."""
    calls = Counter[str]()

    def count(kind: type, method: str) -> None:
        plain = getattr(kind, method)

        def counted(*given: Any) -> Any:
            calls[method] += 1
            return plain(*given)

        monkeypatch.setattr(kind, method, counted)

    count(Held, "checked")
    count(Fleet, "capacity")
    count(ServerMonitor, "_checked")
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(FakeServer()) for _ in range(2)]
        pool, capacities = pool_at(*servers, max_concurrent_requests_per_server=4), list[int]()
        names = [pool.model(f"name-{number}", capacities.append) for number in range(3)]
        await stack.enter_async_context(started(*names))
        assert capacities.count(8) == 3
        calls.clear()
        await asyncio.gather(
            *(served.update(weight_update(1, f"name-{number}")) for number, served in enumerate(names))
        )
        assert calls["checked"]
        assert not calls["capacity"]
        for told in (6, 0):
            calls.clear()
            for monitor in pool._monitors.values():
                monitor.check_now()
            await until(lambda: calls["_checked"] == len(servers), "answers to health checks")
            assert calls["checked"] == told


async def test_a_check_compares_the_names_of_which_the_server_says_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each update of a name changes what a server says. Its other names, hundreds, are compared once they differ themselves."""
    compared = list[str]()
    plain = Held.checked

    def noting(held: Held, *given: Any) -> Any:
        compared.append(held._name)
        return plain(held, *given)

    monkeypatch.setattr(Held, "checked", noting)
    async with FakeServer() as server:
        pool = pool_at(server)
        names = [pool.model(f"name-{number}") for number in range(3)]
        async with started(*names):
            for number, served in enumerate(names):
                await served.update(weight_update(1, f"name-{number}"))
            (monitor,) = pool._monitors.values()

            async def check() -> set[str]:
                compared.clear()
                before = server.answers[STATUS_PATH]
                monitor.check_now()
                await until(lambda: server.answers[STATUS_PATH] > before, "a check")
                await until(lambda: all(each.status()[0].state == "serving" for each in names), "all names")
                return set(compared)

            await check()
            assert await check() == set()
            await names[0].update(weight_update(2, "name-0"))
            assert set(compared) <= {"name-0"}
            assert await check() <= {"name-0"}
            server.loads.changed("name-1")
            assert "name-1" in await check()
            assert (await generate(names[1])).policy_version == 1
            assert await check() <= {"name-1"}
            server.begin_anew()
            assert await check() == {"name-0", "name-1", "name-2"}


async def test_an_update_tells_many_servers_in_several_passes_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[int]()
    passes, plain = 0, Held.want

    def noting(held: Held, *given: Any) -> Any:
        told.append(passes)
        return plain(held, *given)

    async def count() -> None:
        nonlocal passes
        while True:
            passes += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(Held, "want", noting)
    monkeypatch.setattr("counterpoint.inference.pool.pool.TOLD_PER_TICK", 2)
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(FakeServer()) for _ in range(5)]
        served = pool_at(*servers).model("name")
        await stack.enter_async_context(started(served))
        counting = asyncio.create_task(count())
        stack.callback(counting.cancel)
        await served.update(weight_update(1, "name"))
        assert max(Counter(told).values()) == 2 < len(told) == len(servers)
        assert {(await generate(served, str(number))).policy_version for number in range(8)} == {1}


async def test_servers_that_are_due_together_are_asked_a_few_a_pass_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All are after an update: hundreds of checks, loads and proofs at once would hold up the loop."""
    passes, number = list[int](), 0
    ask = BinaryClient._administer

    async def counted(client: BinaryClient, *arguments: Any, **keywords: Any) -> dict[str, Any]:
        passes.append(number)
        return await ask(client, *arguments, **keywords)

    async def count() -> None:
        nonlocal number
        while True:
            number += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(BinaryClient, "_administer", counted)
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(FakeServer()) for _ in range(12)]
        served = pool_at(*servers).model("name")
        counting = asyncio.create_task(count())
        stack.callback(counting.cancel)
        await stack.enter_async_context(started(served))
        await served.update(weight_update(1, "name"))
        asked = Counter(passes)
    assert asked.total() >= 3 * len(servers)
    assert max(asked.values()) <= 2 * CHECKS_PER_TICK, "those of two passes, where the count came in between"


async def test_names_share_a_servers_cap_first_come_first_served_and_one_may_have_less() -> None:
    async with FakeServer() as server:
        pool = pool_at(server, capacity="fixed", max_concurrent_requests_per_server=3)
        told: list[int] = []
        policy, teacher = pool.model("policy", told.append), pool.model("teacher", limit=1)
        async with started(policy, teacher):
            assert told[-1] == 3
            server.gate.clear()
            asked = [asyncio.create_task(generate(teacher, "0"))]
            await until(lambda: server.running == 1, "the teacher's request")
            asked += [asyncio.create_task(generate(teacher, "1"))]
            await asyncio.sleep(0)
            asked += [asyncio.create_task(generate(policy, str(number))) for number in range(4)]
            await until(lambda: server.running == 3, "a full server")
            assert [each.model for each in server.asked] == ["teacher", "policy", "policy"]
            assert (teacher.waiting_requests, policy.waiting_requests) == (1, 2)
            server.gate.set()
            await asyncio.gather(*asked)
            assert server.most_running == 3
            assert [each.model for each in server.asked[3:]].count("teacher") == 1
            assert [each.in_flight for each in policy.status()] == [0]


async def test_a_name_that_no_server_serves_holds_up_no_other() -> None:
    async with FakeServer() as server:
        pool = pool_at(server)
        stuck, other = pool.model("stuck"), pool.model("other")
        async with started(stuck, other):
            server.load_status = 422
            with pytest.raises(InferenceError, match="no inference server took version 1"):
                await stuck.update(weight_update(1, "stuck"))
            waits = asyncio.create_task(generate(stuck))
            await until(lambda: stuck.waiting_requests == 1, "a request that waits")
            assert (await generate(other)).server == server.url
            assert [each.status()[0].state for each in (stuck, other)] == ["out", "serving"]
            server.load_status = 200
            await stuck.update(weight_update(2, "stuck"))
            assert (await waits).policy_version == 2


async def test_one_name_loads_while_another_is_served_and_the_server_is_watched() -> None:
    async with FakeServer() as server:
        pool = pool_at(server, health_interval_seconds=0.02)
        loading, other = pool.model("loading"), pool.model("other")
        async with started(loading, other):
            server.load_gate.clear()
            update = asyncio.create_task(loading.update(weight_update(1, "loading")))
            await until(lambda: loading.status()[0].state == "loading", "a load")
            seen = server.answers[STATUS_PATH]
            await until(lambda: server.answers[STATUS_PATH] > seen + 2, "health checks beside the load")
            assert (await generate(other)).server == server.url
            server.load_gate.set()
            await update
            assert (await generate(loading)).policy_version == 1


async def test_a_name_that_is_released_ends_its_requests_and_the_others_go_on() -> None:
    async with FakeServer() as server:
        pool = pool_at(server)
        policy, evaluated = pool.model("policy"), pool.model("evaluated")
        async with started(policy):
            async with started(evaluated):
                await evaluated.update(weight_update(3, "evaluated"))
                assert (await generate(evaluated)).policy_version == 3
                server.gate.clear()
                ends, stays = asyncio.create_task(generate(evaluated)), asyncio.create_task(generate(policy))
                await until(lambda: server.running == 2, "both requests")
            with pytest.raises(InferenceError, match="closed"):
                await ends
            assert server.unloaded == ["evaluated"]
            server.gate.set()
            assert (await stays).server == server.url
            again = pool.model("evaluated")
            async with started(again):
                await again.update(weight_update(4, "evaluated"))
                assert (await generate(again)).policy_version == 4
        with pytest.raises(InferenceError, match="closed"):
            await pool.model("late").start()


async def test_an_update_does_not_wait_for_a_server_that_nobody_checks_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with FakeServer() as server:
        pool = pool_at(server)
        policy, other = pool.model("policy"), pool.model("other")
        async with started(policy, other):
            [monitor] = pool._monitors.values()

            async def broken() -> None:
                raise RuntimeError("a defect")

            monkeypatch.setattr(monitor.client, "identify", broken)
            async with asyncio.timeout(60):
                for version in (1, 2):
                    await policy.update(weight_update(version, "policy"))
            assert {(each.status()[0].state, "a defect" in each.status()[0].reason) for each in (policy, other)} == {
                ("out", True)
            }


async def test_a_release_that_is_cancelled_leaves_the_pool_to_close_with_its_other_names() -> None:
    async with FakeServer() as server:
        pool = pool_at(server)
        policy, evaluated = pool.model("policy"), pool.model("evaluated")
        async with started(policy):
            await evaluated.start()
            await evaluated.update(weight_update(1, "evaluated"))
            server.unload_gate.clear()
            release = asyncio.create_task(evaluated.release())
            await until(lambda: "/unload" in " ".join(server.answers), "an unload")
            release.cancel()
            with pytest.raises(asyncio.CancelledError):
                await release
            server.unload_gate.set()
        with pytest.raises(InferenceError, match="closed"):
            await pool.model("late").start()
