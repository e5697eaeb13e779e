"""A real vLLM of a base model and an adapter is two teachers: each returns the log-probabilities of its own model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from counterpoint.inference.base import Probe, WeightUpdate
from tests.inference.test_vllm_distillation import TOKENS, TOLERANCE, furthest, pool_at
from tests.inference.test_vllm_neighbours import check_alternatives, repeated
from tests.inference.test_vllm_neighbours import pool_at as alone_at
from tests.support.vllm_server import ServerProcess

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


async def test_a_base_model_and_an_adapter_of_one_server_are_two_teachers(
    lora_server: ServerProcess,
) -> None:
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(Path(lora_server.config.model))
    directory = lora_server.directories[1]
    async with pool_at(lora_server, "scored") as adapter, pool_at(lora_server, lora_server.config.model) as plain:
        await adapter.update(WeightUpdate(1, directory, Probe.read(directory / "probe.json"), "scored"))
        by_adapter = await adapter.score(TOKENS, 40, affinity="0-0")
        by_base = await plain.score(TOKENS, 40, affinity="0-0")
    assert furthest(by_adapter, lora_server.models[1], TOKENS, 40) < TOLERANCE
    assert furthest(by_base, base, TOKENS, 40) < TOLERANCE
    assert np.abs(by_adapter - by_base).max() > 0.1


async def test_probable_tokens_come_beside_scores_and_probes_of_adapters(lora_server: ServerProcess) -> None:
    """There each token is a request of its own."""
    directory, model = lora_server.directories[1], lora_server.models[1]
    update = WeightUpdate(1, directory, Probe.read(directory / "probe.json"), "neighbour")
    async with alone_at(lora_server, "neighbour") as pool:
        await pool.update(update)
        async with repeated(lambda: pool.score(TOKENS, 40, affinity="scores")) as scores:
            await check_alternatives(pool, model, "a")
        assert max(furthest(each, model, TOKENS, 40) for each in scores) < TOLERANCE
        async with repeated(lambda: pool.update(replace(update))):  # of another object: to be loaded
            await check_alternatives(pool, model, "b")
