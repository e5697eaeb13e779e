"""A real vLLM with our plugin, a dense model, LoRA adapters behind a bearer token; and how it ends."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import pytest

from counterpoint.inference import identity, wire
from counterpoint.inference.base import (
    GenerateRequest,
    InferenceError,
    Probe,
    RequestRefused,
    SamplingParameters,
    ServerFailure,
    WeightUpdate,
)
from counterpoint.inference.call_frames import CALLS_PATH
from counterpoint.inference.clients.client import BinaryClient
from counterpoint.inference.clients.http_sessions import HttpSessions
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.plugin.socket_body import HEAD_BYTES
from counterpoint.inference.pool.pool import InferencePool, Served
from counterpoint.inference.sent_weights import OFFER_PATH, SEND_PATH
from counterpoint.inference.token import read_tokens
from counterpoint.transport.process.launch import live_processes
from counterpoint.transport.records import Turn
from tests.inference.test_vllm_moe import metric, running_at
from tests.support.fake_inference import CLAIM
from tests.support.polling import DEADLINE_SECONDS, wait_until
from tests.support.tiny_model import log_probabilities
from tests.support.vllm_server import ServerProcess

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TOLERANCE = 0.004
PROMPT = np.arange(5, 50, dtype=np.int32)
SAMPLING = SamplingParameters(temperature=1.0, max_tokens=24)


@asynccontextmanager
async def pool_at(
    server: ServerProcess, adapter: str, protocol: Literal["binary", "openai"] = "binary", send: bool = False
) -> AsyncIterator[Served]:
    config = PoolConfig(
        urls=[server.url],
        protocol=protocol,
        api_key_file=server.config.api_key_file,
        probe_tolerance=TOLERANCE,
        max_retries=0,
        send_weights=send,
    )
    pool = InferencePool(config).model(adapter)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.release()


def update_to(server: ServerProcess, version: int, adapter: str, directory: Path | None = None) -> WeightUpdate:
    published = server.directories[version]
    return WeightUpdate(version, directory or published, Probe.read(published / "probe.json"), adapter)


def agrees(server: ServerProcess, version: int, turn: Turn) -> bool:
    tokens = np.concatenate([turn.prompt_ids, turn.completion_ids])
    expected = log_probabilities(server.models[version], tokens)[len(turn.prompt_ids) - 1 :]
    return bool(np.abs(expected - turn.log_probabilities).max() < TOLERANCE)


@pytest.mark.parametrize("protocol", ["binary", "openai"])
async def test_adapters_are_replaced_under_one_name(
    lora_server: ServerProcess, protocol: Literal["binary", "openai"]
) -> None:
    name = f"run-{protocol}"
    async with pool_at(lora_server, name, protocol) as pool:
        for version in (0, 1, 2, 3):
            await pool.update(update_to(lora_server, version, name))
            turn = await pool.generate(PROMPT, SAMPLING, affinity="a")
            assert turn.policy_version == version
            assert turn.routed_experts is None
            assert agrees(lora_server, version, turn), "the prompt is the same each time: no stale prefix is served"


def test_a_proof_was_computed_before_the_server_was_ready(lora_server: ServerProcess) -> None:
    """An adapter has a proof of its own, since kernels are compiled for one."""
    assert lora_server.config.log_file is not None
    started, _, served = lora_server.config.log_file.read_text().partition("Starting vLLM server on")
    assert served
    assert "A made-up proof took" in started


async def test_a_stock_server_is_probed_while_it_computes_adapters(lora_server: ServerProcess) -> None:
    """vLLM 0.32's `prompt_logprobs` ends its engine on a CPU where requests of adapters run beside it."""
    async with pool_at(lora_server, "run-busy", "openai") as pool:
        await pool.update(update_to(lora_server, 0, "run-busy"))
        updated = asyncio.Event()

        async def play() -> Turn:
            while True:
                turn = await pool.generate(PROMPT, SAMPLING, affinity="a")
                if updated.is_set() and turn.policy_version == 1:
                    return turn

        async with asyncio.TaskGroup() as group:
            players = [group.create_task(play()) for _ in range(4)]
            await asyncio.sleep(0)
            await pool.update(update_to(lora_server, 1, "run-busy"))
            updated.set()
        assert all(agrees(lora_server, 1, player.result()) for player in players)


async def test_a_stock_servers_prefixes_are_of_one_client_alone(lora_server: ServerProcess) -> None:
    """A run that is resumed, or another job, names other weights alike, and vLLM keeps the prefixes of an adapter by its name."""
    prompt = np.arange(5, 5 + 300, dtype=np.int32) % 200
    for version in (0, 1):
        async with pool_at(lora_server, "run-again", "openai") as pool:
            update = replace(update_to(lora_server, version, "run-again"), version=7)
            await pool.update(update)
            turns = [await pool.generate(prompt, SAMPLING, affinity="a") for _ in range(2)]
            assert all(agrees(lora_server, version, turn) for turn in turns)


async def test_what_an_adapters_slot_holds_has_the_digest_of_what_was_published(lora_server: ServerProcess) -> None:
    async with HttpSessions(PoolConfig(api_key_file=lora_server.config.api_key_file)) as connections:
        client = BinaryClient(lora_server.url, connections)
        for version in (0, 1):
            update = update_to(lora_server, version, "run-digest")
            held = await client.load(update, CLAIM)
            assert held.layers == update.probe.digests["float32"]
            assert held.layers.keys() == {"0", "1"}
        other = replace(update, probe=update_to(lora_server, 0, "run-digest").probe)
        assert "2 of 2 digests" in str(other.probe.mismatched_layers(held))
        await client.unload("run-digest", CLAIM)


@pytest.mark.parametrize("send", [False, True])
async def test_an_adapter_outlives_its_files(lora_server: ServerProcess, tmp_path: Path, send: bool) -> None:
    """The trainer removes old broadcasts. vLLM 0.32 itself would read them again at every step (see `plugin.update`)."""
    shutil.copytree(lora_server.directories[1], tmp_path / "step_1")
    async with pool_at(lora_server, "run-files", send=send) as pool:
        await pool.update(update_to(lora_server, 1, "run-files", tmp_path / "step_1"))
        shutil.rmtree(tmp_path / "step_1")
        assert agrees(lora_server, 1, await pool.generate(PROMPT, SAMPLING, affinity="a"))


async def test_a_broken_adapter_is_refused_and_the_old_one_is_served_still(
    lora_server: ServerProcess, tmp_path: Path
) -> None:
    shutil.copytree(lora_server.directories[2], tmp_path / "step_2")
    weights = tmp_path / "step_2" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    async with pool_at(lora_server, "run-broken") as pool:
        await pool.update(update_to(lora_server, 1, "run-broken"))
        with pytest.raises(InferenceError, match=r"no inference server took version 2: .*truncated"):
            await pool.update(update_to(lora_server, 2, "run-broken", tmp_path / "step_2"))
        await pool.update(update_to(lora_server, 1, "run-broken"))
        assert agrees(lora_server, 1, await pool.generate(PROMPT, SAMPLING, affinity="a"))


async def test_a_stock_server_takes_no_full_weights(lora_server: ServerProcess) -> None:
    async with pool_at(lora_server, lora_server.config.model, "openai") as pool:
        update = replace(update_to(lora_server, 1, "x"), adapter=None)
        with pytest.raises(InferenceError, match="cannot take full weights; train a LoRA adapter"):
            await pool.update(update)


async def test_a_server_of_adapters_takes_no_full_weights(lora_server: ServerProcess) -> None:
    model = Path(lora_server.config.model)
    (model / "STABLE").touch()
    async with pool_at(lora_server, "run-full") as pool:
        await pool.update(update_to(lora_server, 1, "run-full"))
        with pytest.raises(InferenceError, match=r"serves adapters .*a server without lora"):
            await pool.update(replace(update_to(lora_server, 2, "x", model), adapter=None))
        await pool.update(update_to(lora_server, 1, "run-full"))
        assert agrees(lora_server, 1, await pool.generate(PROMPT, SAMPLING, affinity="a"))


@pytest.mark.parametrize("token", [None, "wrong"])
async def test_nothing_but_health_and_metrics_is_open_without_the_token(
    lora_server: ServerProcess, token: str | None
) -> None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession(lora_server.url, headers=headers) as session:
        for path in (
            wire.GENERATE_PATH,
            wire.PROBE_PATH,
            wire.UPDATE_PATH,
            OFFER_PATH,
            SEND_PATH,
            "/v1/completions",
            "/tokenize",
            "/invocations",
        ):
            async with session.post(path, data=b"{}") as response:
                assert response.status == 401, path
        closed = ((identity.STATUS_PATH, 401), (CALLS_PATH, 401))
        for path, status in (*closed, ("/health", 200), ("/metrics", 200)):
            async with session.get(path) as response:
                assert response.status == status, path


async def test_model_calls_share_a_connection_by_which_they_are_aborted(lora_server: ServerProcess) -> None:
    model, long = lora_server.config.model, SAMPLING.replaced(max_tokens=150, ignore_eos=True)
    async with HttpSessions(PoolConfig(api_key_file=lora_server.config.api_key_file)) as connections:
        client = BinaryClient(lora_server.url, connections)
        first = await client.generate(GenerateRequest(model, PROMPT, SAMPLING))
        connection = client._calls._connection
        assert connection is not None
        before = await metric(lora_server, "generation_tokens_total")
        calls = [asyncio.create_task(client.generate(GenerateRequest(model, PROMPT, long))) for _ in range(8)]
        await running_at(lora_server, lambda running: running >= 1)
        for each in calls:
            each.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await running_at(lora_server, lambda running: running == 0)
        assert await metric(lora_server, "generation_tokens_total") - before < len(calls) * long.max_tokens
        with pytest.raises(ServerFailure, match=r"answered 404: model 'nobody' is neither"):
            await client.generate(GenerateRequest("nobody", PROMPT, SAMPLING))
        with pytest.raises(RequestRefused, match="answered 400: a prompt of 10000 tokens leaves no room"):
            await client.generate(GenerateRequest(model, np.ones(10_000, np.int32), SAMPLING))
        with pytest.raises(RequestRefused, match="answered 413"):
            await client.generate(GenerateRequest(model, np.ones(30_000, np.int32), SAMPLING))
        again = await client.generate(GenerateRequest(model, PROMPT, SAMPLING))
        assert len(first.token_ids) == len(again.token_ids) == SAMPLING.max_tokens
        assert client._calls._connection is connection
        assert len(client._http.idle) <= 1, "that of the call which is too long for it"


async def test_a_stranger_sends_no_head_without_end_and_nobody_a_compressed_body(lora_server: ServerProcess) -> None:
    url = urlsplit(lora_server.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(b"GET /health HTTP/1.1\r\nX: " + b"x" * HEAD_BYTES)
    assert b" 431 " in await reader.readline()
    writer.close()
    assert lora_server.config.api_key_file is not None
    token = read_tokens(lora_server.config.api_key_file)[0]
    headers = {"Authorization": f"bearer {token}", "Content-Encoding": "gzip"}
    async with aiohttp.ClientSession(lora_server.url, headers=headers) as session:
        for path in (wire.GENERATE_PATH, "/v1/completions"):
            async with session.post(path, data=b"{}") as response:
                assert response.status == 415, path


@pytest.mark.kills_server
def test_no_process_outlives_a_server_process_that_is_killed(lora_server: ServerProcess) -> None:
    family = lora_server.family()
    assert len(family) >= 3, "ours, vLLM's API server, its engine"
    lora_server.process.kill()
    lora_server.process.wait(DEADLINE_SECONDS)
    wait_until(lambda: not {pid for pid, *_ in live_processes()} & set(family), f"the end of {family}")
