"""Many runs' adapters at one real vLLM that has two slots, and room in memory for no more: they take turns, none meets another's
weights, and one that is unloaded leaves nothing behind.

Every answer is held against Hugging Face's log-probabilities of the adapter that should have given it.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from counterpoint.inference import identity, wire
from counterpoint.inference.base import InferenceError, Probe, RequestRefused, SamplingParameters, WeightUpdate
from counterpoint.inference.clients.client import BinaryClient
from counterpoint.inference.clients.http_sessions import HttpSessions, call
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.pool.pool import InferencePool, Served
from counterpoint.transport.records import Int32Array, Turn
from tests.support.fake_inference import CLAIM
from tests.support.polling import until
from tests.support.tiny_model import log_probabilities, make_adapter, write_probe
from tests.support.vllm_server import PROBE_TOKENS, ServerProcess

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TOLERANCE = 0.004
RUNS, VERSIONS = 5, 2
PROMPT = np.arange(5, 50, dtype=np.int32)
"""The same for all runs: a prefix shared by mistake would show."""
SAMPLING = SamplingParameters(temperature=1.0, max_tokens=24)
LONG = SamplingParameters(temperature=1.0, max_tokens=400)


@dataclass
class Policy:
    """One version of one run."""

    directory: Path
    model: Any

    def update(self, version: int, adapter: str) -> WeightUpdate:
        return WeightUpdate(version, self.directory, Probe.read(self.directory / "probe.json"), adapter)

    def gave(self, turn: Turn) -> bool:
        tokens: Int32Array = np.concatenate([turn.prompt_ids, turn.completion_ids])
        expected = log_probabilities(self.model, tokens)[len(turn.prompt_ids) - 1 :]
        return bool(np.abs(expected - turn.log_probabilities).max() < TOLERANCE)


@pytest.fixture(scope="module")
def policies(lora_server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> list[list[Policy]]:
    """By run and version."""
    root = tmp_path_factory.mktemp("many")

    def make(run: int, version: int) -> Policy:
        directory = root / f"{run}.{version}"
        model = make_adapter(Path(lora_server.config.model), directory, seed=100 + run * VERSIONS + version)
        write_probe(model, directory, version, PROBE_TOKENS)
        return Policy(directory, model)

    return [[make(run, version) for version in range(VERSIONS)] for run in range(RUNS)]


def config_of(server: ServerProcess) -> PoolConfig:
    return PoolConfig(
        urls=[server.url], api_key_file=server.config.api_key_file, probe_tolerance=TOLERANCE, max_retries=0
    )


@asynccontextmanager
async def pool_at(server: ServerProcess, adapter: str) -> AsyncIterator[Served]:
    pool = InferencePool(config_of(server)).model(adapter)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.release()


async def loaded_adapters(server: ServerProcess) -> dict[str, int]:
    assert server.config.api_key_file is not None
    headers = {"Authorization": f"Bearer {server.config.api_key_file.read_text().strip()}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(server.url + identity.STATUS_PATH) as answer,
    ):
        adapters: dict[str, int] = (await answer.json())["adapters"]
        return adapters


async def one_life(server: ServerProcess, run: int, policies: list[Policy], scratch: Path) -> list[tuple[int, Turn]]:
    """A run that generates at all times while its weights change, each broadcast removed as soon as it is loaded."""
    name, turns = f"run-{run}", []
    async with pool_at(server, name) as pool:
        for version, policy in enumerate(policies):
            broadcast = shutil.copytree(policy.directory, scratch / f"{run}.{version}")
            await pool.update(Policy(broadcast, policy.model).update(version, name))
            shutil.rmtree(broadcast)
            calls = [pool.generate(PROMPT, SAMPLING, affinity=str(index)) for index in range(6)]
            turns += [(version, turn) for turn in await asyncio.gather(*calls)]
            if version + 1 < len(policies):
                crossing = asyncio.create_task(pool.generate(PROMPT, LONG, affinity="crossing"))
                await asyncio.sleep(0.05)
        await crossing
    return turns


async def test_more_runs_than_slots_take_turns_and_none_meets_anothers_weights(
    lora_server: ServerProcess, policies: list[list[Policy]], tmp_path: Path
) -> None:
    lives = [one_life(lora_server, run, policies[run], tmp_path) for run in range(RUNS)]
    results = await asyncio.gather(*lives)
    for run, turns in enumerate(results):
        assert len(turns) == 6 * VERSIONS
        for version, turn in turns:
            assert turn.policy_version == version
            assert policies[run][version].gave(turn), f"run {run}, version {version}"
    assert await loaded_adapters(lora_server) == {}, "each run unloaded its own at its end"


async def test_an_update_of_one_run_leaves_the_requests_of_others_alone(
    lora_server: ServerProcess, policies: list[list[Policy]]
) -> None:
    async with pool_at(lora_server, "steady") as steady, pool_at(lora_server, "changing") as changing:
        await steady.update(policies[0][0].update(0, "steady"))
        long = asyncio.create_task(steady.generate(PROMPT, LONG, affinity="a"))
        for version in range(1, 9):
            await changing.update(policies[1][version % 2].update(version % 2, "changing"))
        assert policies[0][0].gave(await long), "over 400 tokens and eight updates of another"


UPDATES, ANSWERS, AT_ONCE = 20, 500, 16
"""Each of two runs has so many."""


def telling_prompt(policies: list[list[Policy]]) -> tuple[Int32Array, list[list[int]]]:
    """A prompt after which each version of each run has another most probable token, by far; and these tokens."""
    for seed in range(1000):
        prompt = np.random.default_rng(seed).integers(5, 100, 6, dtype=np.int32)
        last = [[each.model(torch.tensor(prompt[None])).logits[0, -1] for each in run] for run in policies]
        tokens = [[int(logits.argmax()) for logits in run] for run in last]
        gaps = [float(top[0] - top[1]) for run in last for top in (logits.topk(2).values for logits in run)]
        if len({token for run in tokens for token in run}) == 2 * VERSIONS and min(gaps) > 0.05:
            return prompt, tokens
    raise AssertionError("no prompt tells the adapters apart")


def state_of(pool: Served) -> tuple[str, int | None]:
    status = pool.status()[0]
    return status.state, status.version


async def test_no_answer_of_two_runs_that_are_updated_all_the_time_is_of_the_others_weights(
    lora_server: ServerProcess, policies: list[list[Policy]]
) -> None:
    with torch.inference_mode():
        prompt, tokens = telling_prompt(policies[:2])
    one_token = SamplingParameters(temperature=1.0, max_tokens=1, top_k=1)
    answered, exact = [0, 0], [0, 0]

    async def update(pool: Served, run: int) -> None:
        for number in range(UPDATES):
            await pool.update(policies[run][number % VERSIONS].update(number, f"run-{run}"))
            due = number * ANSWERS // UPDATES
            await until(lambda due=due: answered[run] >= due, "answers between two updates")  # type: ignore[misc]

    async def ask(pool: Served, run: int) -> None:
        while answered[run] < ANSWERS:
            before = state_of(pool)
            turn = await pool.generate(prompt, one_token, affinity="a")
            answered[run] += 1
            (token,) = turn.completion_ids.tolist()
            assert token in tokens[run], "of the other run, or of nobody"
            if before == state_of(pool) == ("serving", turn.policy_version):  # no load fell into it
                assert token == tokens[run][turn.policy_version % VERSIONS]
                exact[run] += 1

    async with pool_at(lora_server, "run-0") as one, pool_at(lora_server, "run-1") as other:
        pools = [one, other]
        for run in (0, 1):
            await pools[run].update(policies[run][0].update(0, f"run-{run}"))
        asking = [ask(pools[run], run) for run in (0, 1) for _ in range(AT_ONCE)]
        await asyncio.gather(update(one, 0), update(other, 1), *asking)
    assert min(answered) >= ANSWERS
    assert min(exact) > 0


@pytest.mark.parametrize("route", ["load_lora_adapter", "unload_lora_adapter"])
async def test_an_adapter_that_vllms_own_routes_replace_or_remove_gives_no_answer_and_is_loaded_again(
    lora_server: ServerProcess, policies: list[list[Policy]], route: str
) -> None:
    async with pool_at(lora_server, "victim") as pool, HttpSessions(config_of(lora_server)) as connections:
        await pool.update(policies[0][0].update(0, "victim"))
        fields: dict[str, Any] = {"lora_name": "victim"}
        if route == "load_lora_adapter":
            fields |= {"lora_path": str(policies[1][0].directory), "load_inplace": True}
        await call(connections.admin, f"{lora_server.url}/v1/{route}", json.dumps(fields).encode())
        for _ in range(3):
            assert policies[0][0].gave(await when_it_serves(pool))


async def test_a_name_used_again_shows_nothing_of_its_former_owner(
    lora_server: ServerProcess, policies: list[list[Policy]]
) -> None:
    for run in (2, 3):
        async with pool_at(lora_server, "same-name") as pool:
            await pool.update(policies[run][0].update(0, "same-name"))
            for _ in range(2):  # the second by the prefix cache
                assert policies[run][0].gave(await pool.generate(PROMPT, SAMPLING, affinity="a"))
        assert await loaded_adapters(lora_server) == {}


async def keep_asking(pool: Served, enough: asyncio.Event) -> list[Turn]:
    """One long request after the other, however quick the machine is."""
    turns = []
    while not enough.is_set():
        turns.append(await pool.generate(PROMPT, LONG, affinity="a"))
    return turns


async def test_unloading_ends_an_adapters_requests_and_nobody_elses(
    lora_server: ServerProcess, policies: list[list[Policy]]
) -> None:
    async with pool_at(lora_server, "stays") as stays, pool_at(lora_server, "goes") as goes:
        await stays.update(policies[0][0].update(0, "stays"))
        await goes.update(policies[1][0].update(0, "goes"))
        unloaded = asyncio.Event()
        staying = asyncio.create_task(keep_asking(stays, unloaded))
        going = [asyncio.create_task(keep_asking(goes, unloaded)) for _ in range(2)]  # fewer than take a server out
        async with HttpSessions(config_of(lora_server)) as connections:
            client = BinaryClient(lora_server.url, connections)
            running = 0
            while running < 3:  # until all are in the engine
                seen = await client.observe()
                assert seen is not None
                running = seen.running
            await client.unload("goes", CLAIM)
            await client.unload("never-there", CLAIM)
            ends = await asyncio.gather(*going, return_exceptions=True)
            unloaded.set()
        assert all(isinstance(end, InferenceError) for end in ends), ends
        assert any("abort" in str(end) for end in ends), ends  # those that were not between two requests
        assert all(policies[0][0].gave(turn) for turn in await staying)
        assert policies[1][0].gave(await when_it_serves(goes)), "its owner has loaded it again"


async def when_it_serves(pool: Served) -> Turn:
    """An answer of a server that may be out of service now."""
    async with asyncio.timeout(60):
        while True:
            with suppress(InferenceError):
                return await pool.generate(PROMPT, SAMPLING, affinity="b")
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("fault", ["shape", "rank", "config"])
async def test_an_adapter_that_does_not_fit_is_refused_and_the_engine_lives(
    lora_server: ServerProcess, policies: list[list[Policy]], tmp_path: Path, fault: str
) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(policies[1][1].directory, broken)
    tensors = load_file(broken / "adapter_model.safetensors")
    down = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    up = down.replace("lora_A", "lora_B")
    match fault:
        case "shape":
            tensors[up] = tensors[up][:-1].clone()
        case "rank":
            tensors[down] = tensors[down].repeat(3, 1)
            tensors[up] = tensors[up].repeat(1, 3)
        case "config":
            settings = json.loads((broken / "adapter_config.json").read_text())
            (broken / "adapter_config.json").write_text(json.dumps(settings | {"r": 4096}))
    save_file(tensors, broken / "adapter_model.safetensors", metadata={"format": "pt"})
    async with pool_at(lora_server, "broken") as pool, HttpSessions(config_of(lora_server)) as connections:
        await pool.update(policies[0][0].update(0, "broken"))
        with pytest.raises(RequestRefused, match="422: adapter 'broken'"):
            await BinaryClient(lora_server.url, connections).load(Policy(broken, None).update(1, "broken"), CLAIM)
        assert policies[0][0].gave(await pool.generate(PROMPT, SAMPLING, affinity="a"))


async def test_an_adapter_cannot_have_the_base_models_name(
    lora_server: ServerProcess, policies: list[list[Policy]]
) -> None:
    base = lora_server.config.model
    async with HttpSessions(config_of(lora_server)) as connections:
        with pytest.raises(RequestRefused, match=r"422: .*the base model is served under this name"):
            await BinaryClient(lora_server.url, connections).load(policies[0][0].update(0, base), CLAIM)
    assert await loaded_adapters(lora_server) == {}


async def test_a_server_tells_its_load_and_that_it_is_to_be_drained(
    lora_server: ServerProcess, policies: list[list[Policy]]
) -> None:
    async with pool_at(lora_server, "loaded") as pool, HttpSessions(config_of(lora_server)) as connections:
        await pool.update(policies[0][0].update(0, "loaded"))
        client = BinaryClient(lora_server.url, connections)
        told = asyncio.Event()
        calls = [asyncio.create_task(keep_asking(pool, told)) for _ in range(40)]
        while True:
            seen = await client.observe()
            assert seen is not None
            if seen.running == 32 and seen.waiting > 0 and 0 < seen.cache_use < 1:
                assert seen.held >= seen.running + seen.waiting
                break
        computed = seen.tokens
        told.set()
        await asyncio.gather(*calls)
        seen = await client.observe()
        assert seen is not None
        assert 0 < computed < seen.tokens
        async with connections.admin.post(lora_server.url + wire.DRAIN_PATH, json={"draining": True}) as answer:
            assert answer.status == 200
        assert (await client.identify()).draining
        async with connections.admin.post(lora_server.url + wire.DRAIN_PATH, json={"draining": False}) as answer:
            assert answer.status == 200
        assert not (await client.identify()).draining
