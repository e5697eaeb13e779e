"""Computes a proof before the server is ready, so that the first real one does not wait for kernels that are compiled.

On a GPU vLLM compiles kernels when a shape first needs them: of log-probabilities, and of adapters, for which a first proof took
4.5 s. The made-up proof has the shape of a real one (`inference/plugin/scoring.py`), and a made-up adapter where adapters are
served, which is removed again.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.inputs import tokens_input
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError

from inference.plugin.scoring import scoring_prompts

logger = init_logger(__name__)

TOKENS = 12
"""Of a trainer's probe (`trainer/probe.py`)."""


async def warm(engine: EngineClient, models: Any, *, serves_adapters: bool) -> None:
    """Computes the proof. A failure is logged, as the server can serve all the same; raises `EngineDeadError`."""
    began = time.monotonic()
    try:
        await _prove(engine, None, serves_adapters)
        if serves_adapters:
            adapter = LoRARequest("warming", models.lora_id_counter.inc(1), "made up, so that it is read from no file")
            await engine.collective_rpc("counterpoint_make_up_adapter", args=(adapter.lora_name, adapter.lora_int_id))
            try:
                await _prove(engine, adapter, serves_adapters)
            finally:
                await engine.remove_lora(adapter.lora_int_id)
    except EngineDeadError:
        raise
    except Exception:
        logger.warning("The first proof will wait for its kernels, as a made-up one has failed", exc_info=True)
    else:
        logger.info("A made-up proof took %.3f s", time.monotonic() - began)


async def _prove(engine: EngineClient, adapter: LoRARequest | None, serves_adapters: bool) -> None:
    salt = uuid.uuid4().hex  # no later prompt shares its prefix
    prompts = scoring_prompts(list(range(TOKENS)), 1, one_by_one=serves_adapters)

    async def score(token_ids: list[int], sampling: Any) -> None:
        prompt = tokens_input(token_ids, cache_salt=salt)
        async for _ in engine.generate(prompt, sampling, uuid.uuid4().hex, lora_request=adapter):
            pass

    await asyncio.gather(*(score(*each) for each in prompts))
