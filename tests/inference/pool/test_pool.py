"""The pool against fake servers on real sockets: failures, moves, weight updates and their proofs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from counterpoint.inference import wire
from counterpoint.inference.base import (
    Completion,
    GenerateRequest,
    HeldWeights,
    InferenceError,
    ModelNotServed,
    RequestRefused,
    SamplingParameters,
    WeightsNotSeen,
)
from counterpoint.inference.clients.client import BinaryClient, ServerIdentity
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.pool.pool import InferencePool, Served
from counterpoint.transport.records import Turn
from tests.support.fake_inference import FakeServer, digest_of, weight_update
from tests.support.polling import until
from tests.support.ports import free_port

SAMPLING = SamplingParameters(temperature=0.7, max_tokens=3)
PROMPT = np.array([7, 8, 9], dtype=np.int32)


@asynccontextmanager
async def pool_of(*servers: FakeServer, **settings: Any) -> AsyncIterator[Served]:
    defaults = {"health_interval_seconds": 0.02, "startup_timeout_seconds": 60, "request_timeout_seconds": 60}
    pool = InferencePool(PoolConfig(urls=[server.url for server in servers], **(defaults | settings))).model("a-model")
    try:
        await pool.start()
        await until(lambda: all(status.state != "unknown" for status in pool.status()), "the first look at each server")
        yield pool
    finally:
        await pool.release()


def states(pool: Served) -> list[str]:
    return [status.state for status in pool.status()]


async def until_states(pool: Served, *expected: str) -> None:
    await until(lambda: states(pool) == list(expected), f"servers that are {', '.join(expected)}")


def timed_out_after_a_look(pool: Served) -> Callable[[object], Awaitable[None]]:
    """In place of a pool's wait for a healthy server: the time is up once each has been looked at, however slow the machine."""

    async def wait(condition: object) -> None:
        await until(lambda: all(status.state != "unknown" for status in pool.status()), "the first look at each server")
        raise TimeoutError

    return wait


async def generate(pool: Served, affinity: str = "a", start: int = 0) -> Turn:
    return await pool.generate(PROMPT, SAMPLING, affinity=affinity, routed_experts_start=start)


async def test_a_turn_says_what_was_asked_and_who_answered() -> None:
    async with FakeServer() as server, pool_of(server) as pool:
        await pool.update(weight_update(4))
        turn = await generate(pool, start=2)
    assert turn.completion_ids.tolist() == [4, 4, 4]
    assert (turn.policy_version, turn.finish_reason, turn.server) == (4, "length", server.url)
    assert turn.temperature == 0.7
    assert (turn.prompt_ids == PROMPT).all()
    assert turn.routed_experts is not None
    assert (turn.routed_experts_start, turn.routed_experts.shape) == (2, (3, 2, 2))


async def test_requests_wait_for_room_at_a_server() -> None:
    async with FakeServer() as server, pool_of(server, max_concurrent_requests_per_server=2) as pool:
        server.gate.clear()
        requests = [asyncio.create_task(generate(pool, str(index))) for index in range(10)]
        await until(lambda: server.running == 2, "2 running requests")
        server.gate.set()
        await asyncio.gather(*requests)
    assert server.most_running == 2


async def test_a_request_waits_to_start_only_where_many_begin_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeServer() as server, pool_of(server, max_concurrent_requests_per_server=64) as pool:
        waited = 0
        wait = pool._servers.starts.wait

        def counted(action: Callable[[], None]) -> None:
            nonlocal waited
            waited += 1
            wait(action)

        monkeypatch.setattr(pool._servers.starts, "wait", counted)

        async def rollout(name: str) -> None:
            for _ in range(8):
                await generate(pool, name)

        await asyncio.gather(*(rollout(str(index)) for index in range(64)))
    assert 0 < waited <= 64, "none but first ones: who gets an answer asks again at once"


async def test_a_dropped_connection_is_retried_at_once() -> None:
    async with FakeServer() as server, pool_of(server) as pool:
        server.drop_next = 1
        assert (await generate(pool)).completion_ids.tolist() == [0, 0, 0]
        assert states(pool) == ["serving"]


async def test_retries_are_bounded_and_the_last_reason_is_told() -> None:
    async with FakeServer() as server, pool_of(server, max_retries=1) as pool:
        server.generate_status = 500
        with pytest.raises(InferenceError, match=r"after 2 attempts.*500: so it was told"):
            await generate(pool)
        assert server.answers["/counterpoint/v1/generate"] == 2


async def test_a_server_that_starts_after_the_pool_is_used_at_once() -> None:
    server, port = FakeServer(), free_port()
    urls = [f"http://127.0.0.1:{port}"]
    pool = InferencePool(PoolConfig(urls=urls, health_interval_seconds=3600, startup_timeout_seconds=60)).model(
        "a-model"
    )
    started = asyncio.create_task(pool.start())
    try:
        await until(lambda: states(pool) == ["out"], "the first look at the server")
        await server.listen(port)
        await asyncio.wait_for(started, 60)
        assert (await generate(pool)).server == urls[0]
    finally:
        started.cancel()
        await pool.release()
        await server.vanish()


async def test_groups_begin_at_one_server_each_and_stay_there() -> None:
    async with FakeServer() as a, FakeServer() as b, pool_of(a, b, health_interval_seconds=60) as pool:
        await until_states(pool, "serving", "serving")
        a.gate.clear()
        b.gate.clear()
        names = [f"{group}-{index}" for group in range(4) for index in range(8)]
        requests = [asyncio.create_task(generate(pool, name)) for name in names]
        await until(lambda: a.running + b.running == 32, "all requests at the servers")
        assert (a.running, b.running) == (16, 16)
        a.gate.set()
        b.gate.set()
        first = [turn.server for turn in await asyncio.gather(*requests)]
        later = [(await generate(pool, name)).server for name in names]
    assert [len(set(first[start : start + 8])) for start in range(0, 32, 8)] == [1, 1, 1, 1]
    assert later == first


@pytest.mark.parametrize(("said", "noted"), [(None, None), (2, 2), (99, 3), (-1, 0)])
async def test_a_turn_says_how_much_of_its_prompt_was_cached(
    monkeypatch: pytest.MonkeyPatch, said: int | None, noted: int | None
) -> None:
    async with FakeServer() as server, pool_of(server) as pool:
        complete = server._complete

        async def cached(asked: GenerateRequest) -> Completion:
            return replace(await complete(asked), cached_tokens=said)

        monkeypatch.setattr(server, "_complete", cached)
        assert (await generate(pool)).cached_tokens == noted


async def test_a_request_that_no_server_will_serve_is_not_retried() -> None:
    async with FakeServer() as server, pool_of(server) as pool:
        server.generate_status = 400
        with pytest.raises(RequestRefused, match="400: so it was told"):
            await generate(pool)
        assert server.answers["/counterpoint/v1/generate"] == 1
        assert states(pool) == ["serving"]


async def test_a_failed_request_goes_to_another_server() -> None:
    async with FakeServer() as bad, FakeServer() as good, pool_of(bad, good, health_interval_seconds=60) as pool:
        bad.generate_status = 500
        turns = [await generate(pool, str(index)) for index in range(8)]
    assert {turn.server for turn in turns} == {good.url}
    # A server that fails fast draws no more requests than it takes to see it, one of which is the pool's own.
    assert bad.answers["/counterpoint/v1/generate"] <= 4


@pytest.mark.parametrize("status", [404, 500, 503])
async def test_what_one_request_cannot_get_takes_no_server_out(status: int) -> None:
    """However often it is tried: a plain request is answered."""
    async with FakeServer() as server, pool_of(server, health_interval_seconds=60) as pool:
        server.gate.clear()
        in_flight = asyncio.create_task(generate(pool))
        await server.arrived.wait()
        server.gate.set()
        server.score_status = lambda _asked: status
        for _ in range(3):
            with pytest.raises(InferenceError, match=str(status)):
                await pool.score(PROMPT, 1, affinity="b")
            assert (states(pool), pool.fleet()["servers"][0]["outages"]) == (["serving"], 0)
        assert (await in_flight).server == server.url
        assert len(server.scored) == 3 * 4
        assert len(server.asked) == 1 + 4, "after each three failures the pool asks for one token"


async def test_of_many_requests_that_fail_at_once_one_asks_for_a_token() -> None:
    async with FakeServer() as server, pool_of(server, health_interval_seconds=60) as pool:
        server.gate.clear()
        server.score_status = lambda _asked: 500
        failing = [asyncio.create_task(pool.score(PROMPT, 1, affinity=str(number))) for number in range(8)]
        await until(lambda: sum(task.done() for task in failing) == 7, "the end of all but the one that waits")
        assert (len(server.asked), states(pool)) == (1, ["serving"])
        server.gate.set()
        assert all(isinstance(each, InferenceError) for each in await asyncio.gather(*failing, return_exceptions=True))
        assert states(pool) == ["serving"]


@pytest.mark.parametrize(("fault", "reason"), [("mute", "0.1 s"), ("nan", "is nan"), ("fails", "so it was told")])
async def test_a_server_that_answers_no_plain_request_after_failures_is_out(
    monkeypatch: pytest.MonkeyPatch, fault: str, reason: str
) -> None:
    monkeypatch.setattr("counterpoint.inference.pool.liveness.SILENT_SECONDS", 0.1 if fault == "mute" else 60)
    async with FakeServer() as bad, FakeServer() as good, pool_of(bad, good, health_interval_seconds=60) as pool:
        await until_states(pool, "serving", "serving")
        match fault:
            case "mute":
                bad.gate.clear()
            case "nan":
                bad.nan = True
            case "fails":
                bad.generate_status = 500
        bad.score_status = lambda _asked: 503
        for name in "abc":
            await pool.score(PROMPT, 1, affinity=name)
        assert states(pool) == ["out", "serving"]
        assert all(part in pool.status()[0].reason for part in ("3 requests", "503", reason))
        assert len(bad.asked) == 1
        bad.gate.set()


@pytest.mark.slow
async def test_a_success_meanwhile_speaks_for_a_server_that_is_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.inference.pool.liveness.SILENT_SECONDS", 2.0)
    async with FakeServer() as busy, pool_of(busy, health_interval_seconds=60) as pool:
        busy.gate.clear()
        busy.score_status = lambda asked: 500 if asked.start == 1 else 200
        failing = asyncio.create_task(pool.score(PROMPT, 1, affinity="a"))
        await until(lambda: len(busy.asked) == 1, "the request for one token")
        await pool.score(PROMPT, 2, affinity="b")
        with pytest.raises(InferenceError):
            await failing
        assert states(pool) == ["serving"]
        busy.gate.set()


async def test_an_answer_with_nan_is_no_answer() -> None:
    async with FakeServer() as bad, FakeServer() as good, pool_of(bad, good) as pool:
        bad.nan = True
        assert (await generate(pool)).server == good.url


async def test_a_server_that_dies_gives_its_requests_to_another_and_returns_with_the_current_weights() -> None:
    async with FakeServer() as first, FakeServer() as second, pool_of(first, second) as pool:
        await pool.update(weight_update(5))
        first.gate.clear()
        request = asyncio.create_task(generate(pool))
        await first.arrived.wait()
        await first.vanish()
        turn = await request
        assert (turn.server, turn.policy_version) == (second.url, 5)
        await until_states(pool, "out", "serving")
        await first.restart()
        first.gate.set()
        await until_states(pool, "serving", "serving")
        assert first.version == 5, "it came back with the weights of version 0 and was brought up to date"


async def test_a_restart_between_two_health_checks_is_noticed() -> None:
    async with FakeServer() as server, pool_of(server) as pool:
        await pool.update(weight_update(5))
        server.begin_anew()
        await until(lambda: server.version == 5, "version 5")
        await until_states(pool, "serving")


async def test_an_answer_of_a_server_that_restarted_since_its_last_health_check_is_made_elsewhere() -> None:
    async with (
        FakeServer() as restarted,
        FakeServer() as other,
        pool_of(restarted, other, health_interval_seconds=3600) as pool,
    ):
        await until_states(pool, "serving", "serving")
        await pool.update(weight_update(5))
        restarted.begin_anew()
        turn = await generate(pool)
        assert restarted.completions == 1
        assert (turn.server, turn.policy_version, turn.completion_ids.tolist()) == (other.url, 5, [5, 5, 5])
        await until(lambda: restarted.version == 5, "version 5, long before the next health check")
        await until_states(pool, "serving", "serving")


async def test_an_unhealthy_server_gives_up_a_request_that_hangs() -> None:
    async with FakeServer() as first, FakeServer() as second, pool_of(first, second) as pool:
        first.gate.clear()
        request = asyncio.create_task(generate(pool))
        await first.arrived.wait()
        first.healthy = False
        assert (await request).server == second.url
        await first.aborted.wait()


async def test_cancelling_a_request_ends_it_at_the_server() -> None:
    async with FakeServer() as server, pool_of(server) as pool:
        server.gate.clear()
        request = asyncio.create_task(generate(pool))
        await server.arrived.wait()
        request.cancel()
        await server.aborted.wait()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert pool.status()[0].in_flight == 0


async def test_a_request_that_is_cancelled_is_cut_and_counted() -> None:
    sampling = SamplingParameters(max_tokens=3)
    async with FakeServer() as server, pool_of(server) as pool:
        server.gate.clear()
        counted: list[int] = []
        request = asyncio.create_task(pool.generate([1, 2], sampling, affinity="a", on_cut=counted.append))
        await server.arrived.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert (counted, server.cuts) == ([3], {server.asked[0].request_id.hex()})
        assert pool.status()[0].in_flight == 0


async def test_a_request_that_cannot_be_cut_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "CUT_PATH", "/nowhere")
    async with FakeServer() as server, pool_of(server) as pool:
        server.gate.clear()
        counted: list[int] = []
        sampling = SamplingParameters(max_tokens=3)
        request = asyncio.create_task(pool.generate([1, 2], sampling, affinity="a", on_cut=counted.append))
        await server.arrived.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await server.aborted.wait()
        assert not counted


async def test_cancelling_a_request_that_waits_gives_its_turn_to_the_next() -> None:
    async with FakeServer() as server, pool_of(server, max_concurrent_requests_per_server=1) as pool:
        server.gate.clear()
        first, second, third = (asyncio.create_task(generate(pool, name)) for name in "abc")
        await server.arrived.wait()
        second.cancel()
        server.gate.set()
        await first
        await third
        assert second.cancelled()
        assert pool.status()[0].in_flight == 0


async def test_a_request_has_a_deadline_and_says_what_it_waited_for() -> None:
    async with FakeServer() as server, pool_of(server, request_timeout_seconds=0.1) as pool:
        server.healthy = False
        await until_states(pool, "out")
        with pytest.raises(InferenceError, match=r"request_timeout_seconds = 0\.1.*is out: .*503"):
            await generate(pool)


async def test_a_request_at_a_server_that_does_not_answer_ends_there_at_its_deadline() -> None:
    async with FakeServer() as server, pool_of(server, request_timeout_seconds=0.1) as pool:
        server.gate.clear()
        asked = 0
        while not server.arrived.is_set():  # in its time, which may pass before on a busy machine
            asked += 1
            with pytest.raises(
                InferenceError, match=r"no answer within request_timeout_seconds = 0\.1: it waited for a server"
            ):
                await generate(pool)
        await server.aborted.wait()
        assert pool.status()[0].in_flight == 0
        assert pool.meters.unanswered == asked
        (described,) = pool.fleet()["servers"]
        assert (described["requests"], described["failures"]) == (0, 0), "else its silence would not be noticed"


async def test_a_retry_has_the_deadline_of_its_request_and_tells_the_last_failure() -> None:
    async with FakeServer() as server, pool_of(server, request_timeout_seconds=0.3, max_retries=10) as pool:
        server.generate_status = 500
        while not pool.meters.retries:  # in its time, which may pass before on a busy machine
            with pytest.raises(InferenceError, match=r"no answer within request_timeout_seconds = 0\.3: ") as raised:
                await generate(pool)
        assert "500" in str(raised.value)
        assert pool.meters.retries < 10


async def test_an_update_keeps_the_requests_in_flight() -> None:
    async with FakeServer() as server, pool_of(server) as pool:
        server.gate.clear()
        request = asyncio.create_task(generate(pool))
        await server.arrived.wait()
        await pool.update(weight_update(1))
        server.gate.set()
        turn = await request
    assert turn.policy_version == 0, "the version when the request began"
    assert server.answers["/counterpoint/v1/generate"] == 1


async def test_an_answer_between_the_load_and_its_proof_is_held_back() -> None:
    async with FakeServer() as server, pool_of(server) as pool:
        server.gate.clear()
        server.probe_gate.clear()
        request = asyncio.create_task(generate(pool))
        await server.arrived.wait()
        update = asyncio.create_task(pool.update(weight_update(1)))
        await until(lambda: server.answers["/counterpoint/v1/probe"] == 1, "the probe")
        server.gate.set()
        await until(lambda: server.running == 0, "0 running requests")
        done, _ = await asyncio.wait({request}, timeout=0.1)
        assert not done
        server.probe_gate.set()
        await update
        await request


async def test_a_pool_that_closes_during_a_probe_returns_no_answer_of_unproven_weights() -> None:
    async with FakeServer() as server, pool_of(server) as pool:
        server.probe_gate.clear()
        loaded = asyncio.Event()
        update = asyncio.create_task(pool.update(weight_update(1), loaded.set))
        await asyncio.wait_for(loaded.wait(), 60)
        request = asyncio.create_task(generate(pool))
        await until(lambda: server.completions == 1, "an answer at the server")
        await pool.release()
        for task in (request, update):
            with pytest.raises(InferenceError, match="closed"):
                await task


async def test_requests_begin_beside_the_probe_once_the_digest_is_right_and_their_answers_wait_for_it() -> None:
    loaded: list[str] = []
    async with FakeServer() as server, pool_of(server) as pool:
        server.probe_gate.clear()
        update = asyncio.create_task(pool.update(weight_update(1), lambda: loaded.append("loaded")))
        await until(lambda: bool(loaded), "the digest")
        request = asyncio.create_task(generate(pool))
        await until(lambda: server.completions == 1, "an answer at the server")
        done, _ = await asyncio.wait({request, update}, timeout=0.1)
        assert not done
        server.probe_gate.set()
        await update
        assert (await request).policy_version == 1
    assert loaded == ["loaded"]


async def test_a_request_that_began_beside_a_probe_that_fails_is_made_elsewhere() -> None:
    async with FakeServer() as broken, FakeServer() as good, pool_of(broken, good, health_interval_seconds=60) as pool:
        broken.probe_gate.clear()
        broken.old_kernels = True
        loaded = asyncio.Event()
        update = asyncio.create_task(pool.update(weight_update(1), loaded.set))
        await asyncio.wait_for(loaded.wait(), 60)
        request = asyncio.create_task(generate(pool))
        await until(lambda: broken.completions == 1, "an answer of the broken server")
        broken.probe_gate.set()
        await update
        turn = await request
        assert (turn.server, turn.policy_version) == (good.url, 1)


async def test_nothing_begins_before_the_proof_at_a_server_without_the_right_digest_or_one_that_comes_back() -> None:
    loaded: list[str] = []
    async with FakeServer() as server, pool_of(server, health_interval_seconds=60) as pool:
        server.deaf = True
        with pytest.raises(InferenceError, match="computes with other weights"):
            await pool.update(weight_update(1), lambda: loaded.append("deaf"))
        server.deaf = False
        server.probe_gate.clear()
        update = asyncio.create_task(pool.update(weight_update(2), lambda: loaded.append("back")))
        await until(lambda: server.answers["/counterpoint/v1/probe"] == 1, "the probe")
        assert loaded == []
        assert states(pool) == ["loading"]
        server.probe_gate.set()
        await update
    assert loaded == ["back"]


async def test_an_answer_of_weights_that_fail_their_proof_is_discarded_and_asked_for_elsewhere() -> None:
    async with FakeServer() as deaf, FakeServer() as good, pool_of(deaf, good) as pool:
        deaf.gate.clear()
        deaf.probe_gate.clear()
        deaf.old_kernels = True
        request = asyncio.create_task(generate(pool))
        await deaf.arrived.wait()
        update = asyncio.create_task(pool.update(weight_update(1)))
        await until(lambda: deaf.answers["/counterpoint/v1/probe"] == 1, "the probe")
        deaf.gate.set()
        await until(lambda: deaf.running == 0, "0 running requests")
        deaf.probe_gate.set()
        await update
        turn = await request
        assert (turn.server, turn.policy_version) == (good.url, 1)


@pytest.mark.parametrize("loads_again", [False, True])
async def test_a_server_taken_out_before_a_request_wakes_in_its_place_is_not_asked(loads_again: bool) -> None:
    async with FakeServer() as server, pool_of(server, max_concurrent_requests_per_server=1) as pool:
        await pool.update(weight_update(1))
        fleet, holder = pool._fleet, next(iter(pool.holders.values()))
        assert fleet.acquire(pool.name, "another") is holder.server
        request = asyncio.create_task(generate(pool))
        await asyncio.sleep(0)  # in which it begins to wait
        # As in one pass of the loop: an answer frees the place, and the server is found unfit.
        fleet.release(pool.name, holder.server)
        pool._servers.serve_waiting()
        holder.take_out("it gave a wrong answer")
        if loads_again:
            identity = ServerIdentity(server.loads.instance, weights=1)
            holder.carry_out(holder.held.checked(identity, holder.held.turn, float("inf")))
            assert states(pool) == ["loading"]
        turn = await request
    assert turn.policy_version == 1, "the version it was brought back with"
    assert server.answers["/counterpoint/v1/generate"] == 1


async def test_a_server_that_fails_the_probe_takes_no_traffic_and_says_so() -> None:
    async with FakeServer() as deaf, FakeServer() as good, pool_of(deaf, good, health_interval_seconds=60) as pool:
        deaf.old_kernels = True
        await pool.update(weight_update(1))
        assert states(pool) == ["out", "serving"]
        assert "failed its probe: its log-probabilities differ from the trainer's by 1.0000" in pool.status()[0].reason
        assert {(await generate(pool, str(index))).server for index in range(4)} == {good.url}


async def test_a_server_that_keeps_the_weights_of_a_version_that_answers_alike_takes_no_traffic() -> None:
    """At a usual learning rate one step moves no answer by more than any tolerance must allow."""
    async with FakeServer() as deaf, FakeServer() as good, pool_of(deaf, good, health_interval_seconds=60) as pool:
        deaf.deaf = good.old_kernels = True
        update = weight_update(1)
        await pool.update(replace(update, probe=replace(update.probe, log_probabilities=[-1.0015, -1.0])))
        assert states(pool) == ["out", "serving"]
        reason = pool.status()[0].reason
        assert reason.endswith("1 of 2 digests differ from those that the trainer published: layer 0")


async def test_a_server_whose_precision_has_no_digest_serves_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Said once: the probe alone misses a step that is small."""
    async with FakeServer() as server, pool_of(server) as pool:
        for version in (1, 2):
            update = weight_update(version)
            probe = replace(update.probe, digests={"bfloat16": digest_of(version)})
            await pool.update(replace(update, probe=probe))
        assert states(pool) == ["serving"]
    warning = f"{server.url} computes in float32, and the trainer publishes digests for bfloat16: only the probe proves"
    assert caplog.text.count(warning) == 1


async def test_a_server_that_failed_the_probe_returns_once_it_passes() -> None:
    async with FakeServer() as deaf, FakeServer() as good, pool_of(deaf, good) as pool:
        deaf.deaf = True
        await pool.update(weight_update(1))
        deaf.deaf = False
        await until_states(pool, "serving", "serving")
        assert deaf.version == 1


async def test_weights_that_no_server_takes_are_an_error() -> None:
    async with FakeServer() as server, pool_of(server, health_interval_seconds=60) as pool:
        server.load_status = 422
        with pytest.raises(InferenceError, match=r"version 1: .*422: these are not weights"):
            await pool.update(weight_update(1))
        server.load_status = 200
        await pool.update(weight_update(2))
        assert states(pool) == ["serving"]


async def test_weights_that_no_server_sees_are_an_error_of_their_own() -> None:
    async with FakeServer() as blind, FakeServer() as other, pool_of(blind, other, health_interval_seconds=60) as pool:
        blind.load_status, other.load_status = 424, 422
        with pytest.raises(InferenceError, match=r"424.*422|422.*424") as caught:
            await pool.update(weight_update(1))
        assert not isinstance(caught.value, WeightsNotSeen)
        other.load_status = 424
        with pytest.raises(WeightsNotSeen, match="no inference server took version 2"):
            await pool.update(weight_update(2))
        other.load_status = 200
        await pool.update(weight_update(3))
        assert states(pool) == ["out", "serving"]


async def test_an_update_does_not_wait_for_a_server_that_is_gone() -> None:
    async with FakeServer() as gone, FakeServer() as good, pool_of(gone, good) as pool:
        await gone.vanish()
        await pool.update(weight_update(1))
        assert good.version == 1
        assert states(pool)[1] == "serving"


@pytest.mark.parametrize("begins_frozen", [True, False])
async def test_an_update_does_not_wait_for_a_server_that_did_not_answer_before(
    begins_frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or was not reached before, and now hangs, as where its host is gone."""
    monkeypatch.setattr("counterpoint.inference.pool.server_monitor.HEALTH_DEADLINE_SECONDS", 0.1)
    frozen = socket.socket()  # once it listens, the kernel accepts, and nobody answers
    with frozen:
        frozen.bind(("127.0.0.1", 0))
        if begins_frozen:
            frozen.listen()
        async with FakeServer() as good, pool_of(good) as pool:
            pool._servers._add(f"http://127.0.0.1:{frozen.getsockname()[1]}")
            await until_states(pool, "serving", "out")
            monkeypatch.setattr("counterpoint.inference.pool.server_monitor.HEALTH_DEADLINE_SECONDS", 3600.0)
            monkeypatch.setattr(pool.holders[pool._fleet.servers[1]].client, "identify", asyncio.Event().wait)
            async with asyncio.timeout(60):
                await pool.update(weight_update(1))
                await pool.update(weight_update(2))
            assert good.version == 2
            assert states(pool) == ["serving", "out"]


@pytest.mark.slow
async def test_an_update_has_a_deadline() -> None:
    """Within which the good server must be done, however busy the machine is."""
    async with FakeServer() as slow, FakeServer() as good, pool_of(slow, good, update_timeout_seconds=2.0) as pool:
        slow.load_gate.clear()
        await pool.update(weight_update(1))
        assert states(pool) == ["out", "serving"]
        assert "update_timeout_seconds = 2" in pool.status()[0].reason
        stuck = pool.holders[pool._fleet.servers[0]]
        stuck._config = stuck._config.model_copy(update={"update_timeout_seconds": 3600.0})
        async with asyncio.timeout(60):
            await pool.update(weight_update(2))  # it is not waited for again
        assert good.version == 2
        slow.load_gate.set()
        await until_states(pool, "serving", "serving")


async def test_the_capacity_is_told_when_servers_come_and_go() -> None:
    told: list[int] = []
    async with FakeServer() as first, FakeServer() as second:
        config = PoolConfig(
            urls=[first.url, second.url + "/"], max_concurrent_requests_per_server=8, health_interval_seconds=0.02
        )
        pool = InferencePool(config).model("a-model", told.append)
        await pool.start()
        await until(lambda: told[-1] == 16, "a capacity of 16")
        await pool.update(weight_update(1))
        assert told[-1] == 16
        first.healthy = False
        await until(lambda: told[-1] == 8, "a capacity of 8")
        first.healthy = True
        await until(lambda: told[-1] == 16, "a capacity of 16")
        await pool.release()


async def test_no_healthy_server_is_an_error_that_names_each(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = FakeServer()
    async with server:
        pass
    pool = InferencePool(PoolConfig(urls=[server.url], startup_timeout_seconds=60)).model("a-model")
    monkeypatch.setattr(pool, "until", timed_out_after_a_look(pool))
    caplog.set_level("INFO")
    with pytest.raises(InferenceError, match=rf"after startup_timeout_seconds = 60: {server.url} is out: "):
        await pool.start()
    waits = f"Waiting up to 60 s for a healthy inference server: {server.url}"
    assert waits in [record.getMessage() for record in caplog.records], "what starts is waited for without a reason"
    await pool.release()
    await pool.release()


async def test_a_model_that_a_server_does_not_have_is_an_error_that_names_those_it_has() -> None:
    async with FakeServer() as server, pool_of(server) as pool:
        await pool.check_model("other")  # a server that lists none is trusted
        server.models = ["a-model", "an-adapter"]
        await pool.check_model("an-adapter")
        with pytest.raises(ModelNotServed, match=rf"{server.url} .*'other'; it has 'a-model', 'an-adapter'$"):
            await pool.check_model("other")
        server.models = []
        await pool.check_model("other")
        server.models = [f"model-{number}" for number in range(1000)]
        with pytest.raises(ModelNotServed, match=r"…$"):
            await pool.check_model("other")


async def test_one_server_that_has_the_model_suffices(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeServer() as good, FakeServer() as bad, FakeServer() as silent, pool_of(bad, good, silent) as pool:
        await until_states(pool, *["serving"] * 3)
        good.models, bad.models = ["ours"], ["theirs"]
        await pool.check_model("ours")
        assert f"{bad.url} has no model 'ours'; it has 'theirs'" in caplog.text
        good.models = ["other"]
        with pytest.raises(ModelNotServed, match="nor has any of 1 other servers"):
            await pool.check_model("ours")


async def test_all_servers_are_asked_for_their_models_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asyncio.Barrier(3)

    async def names_when_all_are_asked(*_: object) -> list[str]:
        await asked.wait()
        return ["ours"]

    async with (
        FakeServer() as first,
        FakeServer() as second,
        FakeServer() as third,
        pool_of(first, second, third) as pool,
    ):
        await until_states(pool, *["serving"] * 3)
        monkeypatch.setattr("counterpoint.inference.pool.model_names.served_models", names_when_all_are_asked)
        with pytest.raises(ModelNotServed):
            await pool.check_model("other")


async def test_closing_ends_what_waits() -> None:
    async with FakeServer() as server, pool_of(server, max_concurrent_requests_per_server=1) as pool:
        server.gate.clear()
        running, waiting = asyncio.create_task(generate(pool, "a")), asyncio.create_task(generate(pool, "b"))
        await server.arrived.wait()
        await pool.release()
        with pytest.raises(InferenceError, match="closed"):
            await waiting
        running.cancel()
        with pytest.raises((asyncio.CancelledError, InferenceError)):
            await running


@pytest.mark.parametrize(("dtype", "taken"), [("float32", False), ("bfloat16", True)])
async def test_what_rounding_explains_is_allowed_to_a_server_that_rounds(
    monkeypatch: pytest.MonkeyPatch, dtype: str, taken: bool
) -> None:
    """In float32 it explains nothing."""
    update = weight_update(1)
    apart = [value - 0.5 for value in update.probe.log_probabilities]
    digests = {dtype: digest_of(1)}
    probe = replace(update.probe, log_probabilities=apart, rounding=[5.0] * len(apart), digests=digests)
    load = BinaryClient.load

    async def loaded(self: BinaryClient, *given: Any, **named: Any) -> HeldWeights:
        return replace(await load(self, *given, **named), dtype=dtype)

    monkeypatch.setattr(BinaryClient, "load", loaded)
    async with FakeServer() as server, pool_of(server) as pool:
        with nullcontext() if taken else pytest.raises(InferenceError, match="nats"):
            await pool.update(replace(update, probe=probe))
