"""A real vLLM: requests that ask for given tokens, as scores and probes do, take nothing from those that ask for the most
probable ones, nor the other way round; by our routes and a stock server's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np
import pytest

from counterpoint.inference.base import Probe, SamplingParameters, WeightUpdate
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.pool.pool import InferencePool, Served
from tests.inference.test_vllm_distillation import TOKENS, TOLERANCE, furthest
from tests.support.polling import until
from tests.support.vllm_server import ServerProcess

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ALTERNATIVES = 5
SAMPLING = SamplingParameters(temperature=1.0, max_tokens=64, alternatives=ALTERNATIVES)


@asynccontextmanager
async def pool_at(server: ServerProcess, model: str, **settings: Any) -> AsyncIterator[Served]:
    config = PoolConfig(
        urls=[server.url], api_key_file=server.config.api_key_file, probe_tolerance=4e-3, max_retries=0, **settings
    )
    pool = InferencePool(config).model(model)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.release()


@asynccontextmanager
async def repeated(action: Callable[[], Any]) -> AsyncIterator[list[Any]]:
    """Does something again and again during the block, which begins after the first time; yields what it returned."""
    results: list[Any] = []
    first = asyncio.Event()

    async def go_on() -> None:
        while True:
            results.append(await action())
            first.set()

    task = asyncio.create_task(go_on())
    await asyncio.wait({task, asyncio.ensure_future(first.wait())}, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield results
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


async def check_alternatives(pool: Served, model: Any, name: str) -> None:
    turns = await asyncio.gather(*(pool.generate(TOKENS, SAMPLING, affinity=f"{name}-{n}") for n in range(9)))
    import torch

    for turn in turns:
        assert turn.alternatives is not None
        tokens = torch.tensor(np.concatenate([TOKENS, turn.completion_ids]).astype(np.int64))
        with torch.no_grad():
            expected = model(tokens[None]).logits[0, len(TOKENS) - 1 : -1].float().log_softmax(-1)
        values_TK = turn.alternatives.log_probabilities_TK
        assert np.abs(values_TK - expected.topk(ALTERNATIVES).values.numpy()).max() < TOLERANCE
        own = expected.gather(-1, torch.tensor(turn.alternatives.token_ids_TK.astype(np.int64))).numpy()
        assert np.abs(values_TK - own).max() < TOLERANCE
    await until(lambda: [status.state for status in pool.status()] == ["serving"], "the server's next serving")


async def test_probable_tokens_come_beside_scores_and_probes(moe_server: ServerProcess) -> None:
    directory, model = moe_server.directories[0], moe_server.models[0]
    update = WeightUpdate(0, directory, Probe.read(directory / "probe.json"), None)
    async with pool_at(moe_server, moe_server.config.model) as pool:
        await pool.update(update)
        async with repeated(lambda: pool.score(TOKENS, 40, affinity="scores")) as scores:
            await check_alternatives(pool, model, "a")
        assert max(furthest(each, model, TOKENS, 40) for each in scores) < TOLERANCE
        async with repeated(lambda: pool.update(replace(update))):  # of another object: to be loaded
            await check_alternatives(pool, model, "b")


async def test_probable_tokens_come_beside_a_stranger_who_asks_for_given_ones(moe_server: ServerProcess) -> None:
    model = moe_server.models[0]
    asked = [3, 1, 4, 15, 9, 2, 6]  # more than the others' alternatives
    fields = {
        "model": moe_server.config.model, "prompt": TOKENS.tolist(), "max_tokens": 24, "temperature": 1.0,
        "logprobs": len(asked), "logprob_token_ids": asked, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    directory = moe_server.directories[0]
    async with aiohttp.ClientSession() as session, pool_at(moe_server, moe_server.config.model, take_over=True) as pool:
        await pool.update(WeightUpdate(0, directory, Probe.read(directory / "probe.json"), None))

        async def ask() -> Any:
            async with session.post(f"{moe_server.url}/v1/completions", json=fields) as answer:
                return await answer.json()

        async with repeated(ask) as answers, pool_at(moe_server, moe_server.config.model, protocol="openai") as stock:
            await check_alternatives(pool, model, "a")
            await check_alternatives(stock, model, "b")
    for answer in answers:
        for row in answer["choices"][0]["logprobs"]["top_logprobs"]:
            assert {f"token_id:{token}" for token in asked} <= row.keys()
            assert min(row.values()) > -99
