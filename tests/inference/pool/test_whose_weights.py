"""Whose weights answer: pools against fake servers that others load, restart and change, on real sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from counterpoint.inference import identity
from counterpoint.inference.base import InferenceError, SamplingParameters, Scores, WrongWeights
from counterpoint.inference.clients.client import ServerIdentity
from counterpoint.inference.clients.openai_client import OpenAIClient
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.loads import Load, LoadClaim, Loads
from counterpoint.inference.pool import held, own_loads
from counterpoint.inference.pool.pool import STOCK_SERVERS_PROVE_NOTHING, InferencePool, Served
from counterpoint.transport.records import Turn
from tests.support.fake_inference import CLAIM, FakeServer, probe_answer, weight_update
from tests.support.polling import until

SAMPLING = SamplingParameters(temperature=0.7, max_tokens=3)
PROMPT = np.array([7, 8, 9], dtype=np.int32)
SOON = 0.02
NEVER = 3600.0


def pool_at(
    server: FakeServer, owner: str = "run 'a'", model: str = "a-model", *, follows: bool = False, **settings: Any
) -> Served:
    given = {"health_interval_seconds": NEVER, "startup_timeout_seconds": 60, "request_timeout_seconds": 60} | settings
    claim = LoadClaim(f"the key of {owner}", owner)
    return InferencePool(PoolConfig(urls=[server.url], **given)).model(model, claim=claim, follows=follows)


@asynccontextmanager
async def started(pool: Served) -> AsyncIterator[Served]:
    try:
        await pool.start()
        yield pool
    finally:
        await pool.release()


async def generate(pool: Served) -> Turn:
    return await pool.generate(PROMPT, SAMPLING, affinity="a")


async def test_of_the_loads_of_a_long_run_the_newest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_loads, "KEPT_LOADS", 3)
    async with FakeServer() as server, started(pool_at(server)) as pool:
        (holder,) = pool.holders.values()
        for version in range(1, 21):
            await pool.update(weight_update(version))
            assert (await generate(pool)).policy_version == version
            assert len(holder.held.loads.versions) <= 6
        assert {(None, number) for number in (18, 19, 20)} <= holder.held.loads.versions.keys()


@pytest.mark.parametrize("adapter", [None, "a-model"])
@pytest.mark.parametrize(
    ("others", "mine", "reason"),
    [
        ((), (), ""),
        ((2,), (), "load 2"),  # it ends with weights that another has loaded meanwhile
        ((2,), (3,), "load 3"),  # or had them in its middle
        ((), (2,), ""),
    ],
)
async def test_all_loads_that_may_have_computed_an_answer_are_the_runs(
    adapter: str | None, others: tuple[int, ...], mine: tuple[int, ...], reason: str
) -> None:
    async with FakeServer() as server, started(pool_at(server)) as pool:
        await pool.update(weight_update(1, adapter))
        (holder,) = pool.holders.values()
        first = server.loads.now(adapter)
        for number in others:
            server.loads.complete(adapter, Load(number, 9, "run 'b'"), CLAIM)
        for number in mine:
            holder.held.loads.versions[adapter, number] = number
            server.loads.complete(adapter, Load(number, number, "run 'a'"), CLAIM)
        origin = server.loads.origin(adapter, first)
        with pytest.raises(WrongWeights, match=reason) if reason else nullcontext():
            holder.check_origin(origin)
        assert pool.status()[0].state == ("out" if reason else "serving")


async def test_an_answer_has_the_version_of_the_load_that_it_began_with() -> None:
    """Whatever the server had when it was asked: a load may begin between the two."""
    async with FakeServer() as server, started(pool_at(server)) as pool:
        (holder,) = pool.holders.values()
        loads = {}
        for version in (5, 6):
            await pool.update(weight_update(version))
            loads[version] = server.loads.origin(None, server.loads.now(None))
        assert [holder.held.version_of(loads[version], 99) for version in (5, 6)] == [5, 6]
        assert holder.held.version_of(None, 99) == 99


async def test_weights_that_failed_their_proof_are_none_of_the_runs() -> None:
    async with FakeServer() as server, started(pool_at(server)) as pool:
        (holder,) = pool.holders.values()
        await pool.update(weight_update(1))
        proven = server.loads.origin(None, server.loads.now(None))
        server.old_kernels = True
        with pytest.raises(InferenceError, match="probe"):
            await pool.update(weight_update(2))
        unproven = server.loads.origin(None, server.loads.now(None))
        assert unproven.first == proven.first + 1
        holder.check_origin(proven)
        with pytest.raises(WrongWeights, match="load 2"):
            holder.check_origin(unproven)


async def test_a_second_run_at_one_server_is_refused_with_the_first_ones_name() -> None:
    async with FakeServer() as server, started(pool_at(server)) as first:
        await first.update(weight_update(1))
        async with started(pool_at(server, "run 'b' in /elsewhere")) as second:
            with pytest.raises(InferenceError, match=r"belong to run 'a', not to run 'b' in /elsewhere.*take_over"):
                await second.update(weight_update(9))
        assert (await generate(first)).completion_ids.tolist() == [1, 1, 1]
        assert server.versions == [1]


async def test_the_owner_may_load_again_after_it_was_killed_and_anyone_once_it_has_ended() -> None:
    async with FakeServer() as server:
        killed = pool_at(server)
        await killed.start()
        await killed.update(weight_update(1))
        async with started(pool_at(server)) as resumed:  # the first never gives the weights up
            await resumed.update(weight_update(2))
            assert (await generate(resumed)).policy_version == 2
        async with started(pool_at(server, "run 'b'")) as other:
            await other.update(weight_update(3))
            assert (await generate(other)).policy_version == 3
        killed.holders.clear()  # so that it gives nothing up now, either
        await killed.release()


@pytest.mark.parametrize("adapter", [None, "a-model"])
async def test_whoever_takes_over_gets_the_weights_and_the_former_owner_trains_on_none_of_its_answers(
    adapter: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeServer() as server, started(pool_at(server)) as former:
        await former.update(weight_update(1, adapter))
        async with started(pool_at(server, "run 'b'", take_over=True)) as other:
            await other.update(weight_update(9, adapter))
            answer = asyncio.create_task(generate(former))
            message = "it answers with weights that this run did not load there: load 2: version 9, by run 'b'"
            await until(lambda: message in caplog.text, "the refused answer")
            answer.cancel()
            with pytest.raises(InferenceError, match="belong to run 'b'"):
                await former.update(weight_update(2, adapter))
            assert (await generate(other)).completion_ids.tolist() == [9, 9, 9]
        assert server.versions == [1, 9]


async def test_who_took_over_once_does_not_take_back_what_another_took_over() -> None:
    async with FakeServer() as server, started(pool_at(server, take_over=True)) as first:
        await first.update(weight_update(1))
        async with started(pool_at(server, "run 'b'", take_over=True)) as second:
            await second.update(weight_update(2))
            with pytest.raises(InferenceError, match="belong to run 'b'"):
                await first.update(weight_update(3))
    assert server.versions == [1, 2]


@pytest.mark.parametrize("adapter", [None, "a-model"])
async def test_who_took_over_once_gives_up_at_its_end_only_what_is_still_its_own(adapter: str | None) -> None:
    async with FakeServer() as server, started(pool_at(server, "run 'b'", take_over=True)) as second:
        async with started(pool_at(server, take_over=True)) as first:
            await first.update(weight_update(1, adapter))
            await second.update(weight_update(2, adapter))
        assert server.unloaded == []
        async with started(pool_at(server, "run 'c'")) as third:
            with pytest.raises(InferenceError, match="belong to run 'b', not to run 'c'"):
                await third.update(weight_update(3, adapter))


def with_the_same_weights(server: FakeServer) -> None:
    version = server.version
    server.begin_anew()
    server.version = version


def with_other_weights(server: FakeServer) -> None:
    server.begin_anew()
    server.version = 77


@pytest.mark.parametrize("restart", [with_the_same_weights, with_other_weights])
async def test_a_server_that_was_restarted_by_hand_serves_once_it_has_the_runs_weights_again(
    restart: Callable[[FakeServer], None], caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeServer() as server, started(pool_at(server, max_retries=8)) as pool:
        await pool.update(weight_update(5))
        restart(server)
        turn = await generate(pool)
        assert (turn.policy_version, turn.completion_ids.tolist()) == (5, [5, 5, 5])
        assert server.versions == [5, 5]
        assert "it was restarted, and holds the weights it was started with" in caplog.text


@pytest.mark.parametrize("adapter", [None, "a-model"])
async def test_the_first_load_of_a_run_takes_no_server_out(
    adapter: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeServer() as server, started(pool_at(server)) as pool:
        for version in (1, 2):
            await pool.update(weight_update(version, adapter))
        await generate(pool)
    assert "takes no traffic" not in caplog.text


@pytest.mark.parametrize("change", ["removed", "replaced"])
@pytest.mark.parametrize("interval", [SOON, NEVER])
async def test_an_adapter_that_is_changed_on_a_server_is_loaded_again(change: str, interval: float) -> None:
    async with (
        FakeServer() as server,
        started(pool_at(server, health_interval_seconds=interval, max_retries=8)) as pool,
    ):
        await pool.update(weight_update(5, "a-model"))
        if change == "removed":
            del server.adapters["a-model"]
        else:
            server.adapters["a-model"] = 77
        server.loads.changed("a-model")
        if interval == SOON:
            await until(lambda: server.versions == [5, 5], "the second load, without any request")
        turn = await generate(pool)
        assert (turn.policy_version, turn.completion_ids.tolist()) == (5, [5, 5, 5])


async def test_a_late_answer_to_a_health_check_does_not_count_as_one_of_what_was_loaded_meanwhile() -> None:
    async with FakeServer() as server, started(pool_at(server)) as pool:
        (monitor,) = pool._servers._monitors.values()
        identity, turns = await monitor.client.identify(), monitor._turns_of_names()
        await pool.update(weight_update(5, "a-model"))
        monitor._checked(identity, turns)
        del server.adapters["a-model"]  # so that it says what it said before
        monitor.check_now()
        await until(lambda: server.versions == [5, 5], "the second load")


async def test_weights_that_change_while_a_request_runs_are_accepted_from_the_owner_and_from_nobody_else() -> None:
    async with FakeServer() as server, started(pool_at(server, max_retries=8)) as pool:
        await pool.update(weight_update(1))
        server.gate.clear()
        request = asyncio.create_task(generate(pool))
        await server.arrived.wait()
        server.loads.changed(None)  # and back, before the answer ends
        await pool.update(weight_update(2))
        server.gate.set()
        turn = await request
        assert len(server.asked) == 2, "the answer of three loads was refused, and the request made again"
        assert turn.completion_ids.tolist() == [2, 2, 2]


async def test_a_pool_that_loads_nothing_keeps_to_the_weights_that_it_found() -> None:
    async with FakeServer() as server, started(pool_at(server)) as run, started(pool_at(server, "eval")) as reader:
        assert (await generate(reader)).completion_ids.tolist() == [0, 0, 0]
        await run.update(weight_update(1))
        answer = asyncio.create_task(generate(reader))
        await until(lambda: reader.status()[0].state == "out", "the server that has changed")
        await until(lambda: "other weights under the name 'a-model' than at first" in reader.status()[0].reason, "why")
        answer.cancel()
        server.begin_anew()  # with what it was started with, as before
        server.version = 0
        (holder,) = reader.holders.values()
        assert isinstance(holder.held.state, held.Out)
        holder.held.state = replace(holder.held.state, not_before=0.0)
        holder._check()
        assert (await generate(reader)).completion_ids.tolist() == [0, 0, 0]


async def test_a_pool_that_follows_another_run_takes_whatever_that_has_loaded() -> None:
    async with (
        FakeServer() as server,
        started(pool_at(server)) as run,
        started(pool_at(server, "guest", follows=True)) as opponent,
    ):
        for version in (1, 2):
            await run.update(weight_update(version, "a-model"))
            assert (await generate(opponent)).completion_ids.tolist() == [version] * 3


async def test_a_server_that_does_not_prove_that_it_is_the_jobs_gets_no_request_whatever_it_answers(
    tmp_path: Path,
) -> None:
    identity.make(own := tmp_path / "own")
    identity.make(others := tmp_path / "others")
    async with FakeServer() as server:
        server.secret = identity.read(others)
        pool = pool_at(server, identity_file=own, health_interval_seconds=SOON)
        start = asyncio.create_task(pool.start())
        try:
            await until(lambda: [each.state for each in pool.status()] == ["out"], "the first look")
            assert "is not this job's server: it does not prove the identity in" in pool.status()[0].reason
            assert not server.asked
            server.secret = identity.read(own)
            await start
            await pool.update(weight_update(1))
            assert (await generate(pool)).completion_ids.tolist() == [1, 1, 1]
            server.secret = identity.read(others)  # another server has got the port
            await until(lambda: pool.status()[0].state == "out", "a later look")
        finally:
            start.cancel()
            await pool.release()


async def test_nobody_loads_weights_into_a_jobs_server_who_does_not_prove_to_be_of_the_job(tmp_path: Path) -> None:
    identity.make(file := tmp_path / "servers.key")
    async with FakeServer() as server:
        server.secret = identity.read(file)
        server.loads = Loads("first", server.secret, str(file))
        async with (
            started(pool_at(server, "a stranger")) as stranger,
            started(pool_at(server, identity_file=file)) as own,
        ):
            with pytest.raises(InferenceError, match=r"identity is in .*servers\.key, .*stranger"):
                await stranger.update(weight_update(9))
            await own.update(weight_update(1))
            assert (await generate(own)).completion_ids.tolist() == [1, 1, 1]
        assert server.versions == [1]


async def test_stock_servers_which_prove_nothing_are_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def nothing(*_: object) -> None:
        pass

    async def as_probed(client: OpenAIClient, model: str, token_ids: list[int]) -> Scores:
        return Scores(np.array(probe_answer(1, token_ids), dtype=np.float32))

    async def healthy(client: OpenAIClient) -> ServerIdentity:
        return ServerIdentity(client.url)

    monkeypatch.setattr(OpenAIClient, "identify", healthy)
    monkeypatch.setattr(OpenAIClient, "load", nothing)
    monkeypatch.setattr(OpenAIClient, "probe", as_probed)
    async with FakeServer() as server, started(pool_at(server, protocol="openai")) as pool:
        assert STOCK_SERVERS_PROVE_NOTHING not in caplog.text
        for _ in range(2):
            await pool.update(weight_update(1, "a-model"))
        assert [status.state for status in pool.status()] == ["serving"]
    assert caplog.text.count(STOCK_SERVERS_PROVE_NOTHING) == 1


@pytest.mark.slow
async def test_ten_thousand_answers_of_two_runs_that_are_updated_and_vandalised_are_all_of_the_right_weights() -> None:
    """Even versions are those of `a`, odd ones of `b`; a vandal gives each the other's, or removes it."""
    updates, requests, at_once = 200, 5000, 50
    answered = {0: 0, 1: 0}
    chance = random.Random(0)
    async with FakeServer() as server:
        settings: dict[str, Any] = {"health_interval_seconds": 0.05, "max_retries": 100, "capacity": "fixed"}
        async with (
            started(pool_at(server, "run 'a'", "a", **settings)) as a,
            started(pool_at(server, "run 'b'", "b", **settings)) as b,
        ):

            async def update(pool: Served, name: str, parity: int) -> None:
                for number in range(updates):
                    await pool.update(weight_update(2 * number + parity, name))
                    due = number * requests // updates
                    await until(lambda due=due: answered[parity] >= due, "answers between two updates")  # type: ignore[misc]

            async def ask(pool: Served, parity: int) -> None:
                for number in range(requests // at_once):
                    turn = await pool.generate(PROMPT, SAMPLING, affinity=str(number))
                    assert {int(token) % 2 for token in turn.completion_ids} == {parity}
                    assert int(turn.completion_ids[0]) >= turn.policy_version
                    answered[parity] += 1

            async def vandalise() -> None:
                """Does harm once for a hundred answers, so that the servers serve in between however slow the machine is."""
                for answers in range(0, 2 * requests, 100):
                    await until(lambda answers=answers: sum(answered.values()) >= answers, "answers")  # type: ignore[misc]
                    name, other = chance.sample(["a", "b"], 2)
                    if name in server.adapters and other in server.adapters:
                        server.adapters[name] = server.adapters[other]
                        if chance.random() < 0.5:
                            del server.adapters[name]
                        server.loads.changed(name)

            await a.update(weight_update(0, "a"))
            await b.update(weight_update(1, "b"))
            asking = [ask(pool, parity) for pool, parity in ((a, 0), (b, 1)) for _ in range(at_once)]
            await asyncio.gather(update(a, "a", 0), update(b, "b", 1), vandalise(), *asking)
    assert answered == {0: requests, 1: requests}
