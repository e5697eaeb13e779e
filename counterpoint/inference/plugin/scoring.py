"""Log-probabilities of given tokens under a served model, for a teacher (`orchestrator/teacher.py`) and for the probe; of others.

They are those of the whole distribution at temperature 1. One request prefills the tokens and returns vLLM's prompt
log-probabilities; the last token is not fed to the model but asked for as the next one, so that a sequence that fills the context
can be scored. Where adapters are served on a CPU, each token is a request of its own: prompt log-probabilities end vLLM 0.32's
engine there (`PunicaWrapperCPU.add_lora_logits`, which counts one row a request). A GPU's kernels count so,
too: a probe is asked in this way wherever adapters are served.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.engine.protocol import EngineClient
from vllm.inputs import tokens_input
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from counterpoint.transport.records import Alternatives, Float32Array

logger = init_logger(__name__)

MAX_ONE_BY_ONE = 1024
"""Most tokens that are scored by a request each."""

PROBE_TOKENS = 12
"""Tokens of a trainer's probe (`counterpoint/trainer/probe.py`)."""


def next_token_sampling(token_id: int, **further: Any) -> SamplingParams:
    """Returns sampling parameters that give the log-probability of one next token."""
    return SamplingParams(
        max_tokens=1,
        logprob_token_ids=[token_id],
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
        **further,
    )


def scoring_prompts(token_ids: list[int], start: int, *, one_by_one: bool) -> list[tuple[list[int], SamplingParams]]:
    """Returns the requests whose outputs have the log-probabilities of `token_ids[start:]`. `start` is at least 1."""
    if one_by_one:
        return [(token_ids[:end], next_token_sampling(token_ids[end])) for end in range(start, len(token_ids))]
    return [(token_ids[:-1], next_token_sampling(token_ids[-1], prompt_logprobs=0))]


def scores_of(outputs: Sequence[Any], token_ids: list[int], start: int) -> Float32Array:
    """Returns the log-probabilities of `token_ids[start:]` from the outputs of `scoring_prompts`."""
    targets = token_ids[len(token_ids) - len(outputs) :]
    values = [output.outputs[0].logprobs[0][token].logprob for output, token in zip(outputs, targets, strict=True)]
    if len(outputs) == 1 and outputs[0].prompt_logprobs is not None:
        rows = outputs[0].prompt_logprobs
        values = [rows[place][token_ids[place]].logprob for place in range(start, len(token_ids) - 1)] + values
    return np.asarray(values, dtype=np.float32)


def alternatives_of(logprobs: Any, count: int) -> Alternatives:
    """Returns the `count` most probable tokens at each place of a completion, of vLLM's flat log-probabilities.

    Of each place these hold the sampled token, and then `count` others, the most probable first; it may be one of them again.
    Raises `LookupError` where vLLM has left them out, which only a sampler does that is not ours (`engine/sampler.py`).
    """
    found_T = np.subtract(logprobs.end_indices, logprobs.start_indices)
    if (lacking := found_T <= count).any():
        raise LookupError(f"the most probable tokens of place {int(lacking.argmax())} are missing")
    places_TK = np.asarray(logprobs.start_indices)[:, None] + 1 + np.arange(count)
    token_ids, values = np.asarray(logprobs.token_ids, np.int32), np.asarray(logprobs.logprobs, np.float32)
    if (lacking := values[places_TK[:, 0]] == -np.inf).any():  # The most probable token of all can be sampled.
        raise LookupError(f"the most probable tokens of place {int(lacking.argmax())} are missing")
    return Alternatives(token_ids[places_TK], values[places_TK])


async def warm(engine: EngineClient, models: Any, *, serves_adapters: bool) -> None:
    """Computes a made-up proof before the server is ready, so that the first real one does not wait for kernels.

    On a GPU vLLM compiles kernels when a shape first needs them: of log-probabilities, and of adapters, for which a first proof
    took 4.5 s. The made-up one has the shape of a real one, and a made-up adapter where adapters are served, which is removed
    again. A failure is logged, as the server can serve all the same; raises `EngineDeadError`.
    """
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
    prompts = scoring_prompts(list(range(PROBE_TOKENS)), 1, one_by_one=serves_adapters)

    async def score(token_ids: list[int], sampling: Any) -> None:
        prompt = tokens_input(token_ids, cache_salt=salt)
        async for _ in engine.generate(prompt, sampling, uuid.uuid4().hex, lora_request=adapter):
            pass

    await asyncio.gather(*(score(*each) for each in prompts))
