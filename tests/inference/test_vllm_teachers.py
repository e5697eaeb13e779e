"""A real vLLM of a base model and an adapter is two teachers: each returns the log-probabilities of its own model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from counterpoint.inference.base import Probe, WeightUpdate
from tests.inference.test_vllm_distillation import TOKENS, TOLERANCE, furthest, pool_at
from tests.support.vllm_server import ServerProcess

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


async def test_a_base_model_and_an_adapter_of_one_server_are_two_teachers(
    lora_server: ServerProcess,
) -> None:
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(Path(lora_server.config.model))
    directory = lora_server.directories[1]
    async with pool_at(lora_server, "scored") as adapter, pool_at(lora_server, lora_server.config.model) as plain:
        await adapter.update_weights(WeightUpdate(1, directory, Probe.read(directory / "probe.json"), "scored"))
        by_adapter = await adapter.score(TOKENS, 40, affinity="0-0")
        by_base = await plain.score(TOKENS, 40, affinity="0-0")
    assert furthest(by_adapter, lora_server.models[1], TOKENS, 40) < TOLERANCE
    assert furthest(by_base, base, TOKENS, 40) < TOLERANCE
    assert np.abs(by_adapter - by_base).max() > 0.1
