"""Log-probabilities of given tokens, as a teacher returns them, are what Hugging Face computes: at temperature 1, of the whole
distribution, however the tokens were sampled. By both protocols, up to the end of the context."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest

from counterpoint.environments.chat import Chat
from counterpoint.inference.base import Probe, RequestRefused, SamplingParameters, WeightUpdate
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.pool.pool import InferencePool, Served
from counterpoint.orchestrator.other_servers import compare_tokenizers
from counterpoint.transport.records import Float32Array, Int32Array
from tests.support.tiny_model import log_probabilities
from tests.support.vllm_server import ServerProcess

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TOLERANCE = 1e-3
"""Between vLLM's log-probabilities and Hugging Face's, both in float32."""

TOKENS = np.random.default_rng(0).integers(0, 250, 96).astype(np.int32)
FULL = np.random.default_rng(1).integers(0, 250, 512).astype(np.int32)
"""As many tokens as the servers' context."""


@asynccontextmanager
async def pool_at(
    server: ServerProcess, model: str, protocol: Literal["binary", "openai"] = "binary"
) -> AsyncIterator[Served]:
    config = PoolConfig(
        urls=[server.url],
        protocol=protocol,
        api_key_file=server.config.api_key_file,
        probe_tolerance=4e-3,
        max_retries=0,
    )
    pool = InferencePool(config).model(model)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.release()


def furthest(scores: Float32Array, model: Any, token_ids: Int32Array, start: int) -> float:
    expected = log_probabilities(model, token_ids)[start - 1 :]
    assert scores.shape == expected.shape
    return float(np.abs(scores - expected).max())


async def test_scores_are_those_of_hugging_face(moe_server: ServerProcess) -> None:
    directory, model = moe_server.directories[0], moe_server.models[0]
    async with pool_at(moe_server, moe_server.config.model) as pool:
        await pool.update(WeightUpdate(0, directory, Probe.read(directory / "probe.json"), None))
        for tokens, start in ((TOKENS, 1), (TOKENS, 40), (TOKENS, 95), (FULL, 500), (TOKENS[:2], 1)):
            assert furthest(await pool.score(tokens, start, affinity="0-0"), model, tokens, start) < TOLERANCE
        sampling = SamplingParameters(temperature=0.5, max_tokens=24, top_k=20)
        cold = await pool.generate(TOKENS, sampling, affinity="0-0")
        written = np.concatenate([TOKENS, cold.completion_ids])
        scores = await pool.score(written, len(TOKENS), affinity="0-0")
        assert furthest(scores, model, written, len(TOKENS)) < TOLERANCE
        assert np.abs(scores - cold.log_probabilities).max() > 0.1, "at temperature 1, not as they were sampled"
        with pytest.raises(RequestRefused, match="token ids must be from 0 to"):
            await pool.score(np.array([1, 300], np.int32), 1, affinity="0-0")
    async with pool_at(moe_server, moe_server.config.model, "openai") as pool:
        for tokens, start in ((TOKENS, 40), (TOKENS, 95), (FULL, 500)):
            assert furthest(await pool.score(tokens, start, affinity="0-0"), model, tokens, start) < TOLERANCE


async def test_the_tokenizer_is_compared_with_the_servers(moe_server: ServerProcess) -> None:
    async with pool_at(moe_server, moe_server.config.model) as pool:
        await compare_tokenizers(
            partial(pool.detokenize, affinity="a"), Chat(moe_server.config.model), "teacher", "take another"
        )
