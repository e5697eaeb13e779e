"""A real vLLM: stop strings and truncated distributions, by our route and by a stock server's, against Hugging Face."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from counterpoint.inference.base import (
    Completion,
    GenerateRequest,
    Probe,
    RequestRefused,
    SamplingParameters,
    WeightUpdate,
)
from counterpoint.inference.clients.client import BinaryClient, ServerClient
from counterpoint.inference.clients.http_sessions import HttpSessions
from counterpoint.inference.clients.openai_client import OpenAIClient
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.pool.calls import ignores_temperature
from counterpoint.transport.records import Float32Array
from tests.support.fake_inference import CLAIM
from tests.support.tiny_model import END, make_model
from tests.support.vllm_server import ServerProcess, run_server, tiny_config

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TOLERANCE = 0.004
"""Between vLLM's log-probabilities and Hugging Face's, both in float32."""

PROMPT = np.arange(5, 50, dtype=np.int32)
GREEDY = SamplingParameters(temperature=0.01, max_tokens=48, top_k=1)
"""The most probable token each time; its log-probability is then 0."""
WARM = SamplingParameters(temperature=0.8, max_tokens=64, stop_token_ids=(END,))


@asynccontextmanager
async def clients_of(server: ServerProcess) -> AsyncIterator[list[ServerClient]]:
    """Yields the clients of a server that has the weights of version 0."""
    directory = server.directories[0]
    async with HttpSessions(PoolConfig()) as connections:
        binary = BinaryClient(server.url, connections)
        await binary.load(WeightUpdate(0, directory, Probe.read(directory / "probe.json"), None), CLAIM)
        yield [binary, OpenAIClient(server.url, connections)]
        await binary.unload(None, CLAIM)


def request(server: ServerProcess, sampling: SamplingParameters) -> GenerateRequest:
    return GenerateRequest(server.config.model, PROMPT, sampling)


def two_letters(tokenizer: Tokenizer, token_ids: list[int]) -> tuple[str, int]:
    """The first text of two tokens that is ASCII and does not occur before, and how many tokens end with it."""
    letters = [tokenizer.decode([token]) for token in token_ids]
    for end in range(3, len(letters)):
        pair = letters[end - 2] + letters[end - 1]
        if pair.isascii() and len(pair) == 2 and pair not in "".join(letters[: end - 1]):
            return pair, end
    raise AssertionError("the model of these seeds writes such a pair")


async def test_a_stop_string_ends_a_completion_with_the_very_tokens_that_complete_it(moe_server: ServerProcess) -> None:
    tokenizer = Tokenizer.from_file(f"{moe_server.config.model}/tokenizer.json")
    async with clients_of(moe_server) as clients:
        free = await clients[0].generate(request(moe_server, GREEDY))
        stop, length = two_letters(tokenizer, free.token_ids.tolist())
        for client in clients:
            stopped = await client.generate(request(moe_server, GREEDY.replaced(stop=("not in there", stop))))
            assert (stopped.finish_reason, stopped.token_ids.tolist()) == ("stop", free.token_ids[:length].tolist())
            assert stopped.routed_experts is not None
            assert free.routed_experts is not None
            assert (stopped.routed_experts == free.routed_experts[: len(PROMPT) + length - 1]).all()
            sampling = WARM.replaced(stop=tuple("aeio"))
            warm = await client.generate(request(moe_server, sampling))
            expected = truncated_log_probabilities(moe_server, warm, sampling)
            assert np.abs(warm.log_probabilities - expected).max() < TOLERANCE


async def test_a_stop_string_that_is_a_special_token_stops(moe_server: ServerProcess) -> None:
    tokenizer = Tokenizer.from_file(f"{moe_server.config.model}/tokenizer.json")
    stops = ("<start>", "<pad>", "<unused>")
    ids = {tokenizer.token_to_id(stop) for stop in stops}
    # The widest that vLLM takes: what a configuration may say, it does.
    sampling = SamplingParameters(temperature=2.0, max_tokens=400, stop_token_ids=(END,), stop=stops, top_k=2**31 - 1)
    async with clients_of(moe_server) as clients:
        for client in clients:
            for _ in range(100):
                completion = await client.generate(request(moe_server, sampling))
                if written := ids & set(completion.token_ids.tolist()):
                    break
            assert written == {completion.token_ids[-1]}
            assert completion.finish_reason == "stop"


async def test_a_completion_may_fill_the_context_at_a_stock_server(moe_server: ServerProcess) -> None:
    asked = request(moe_server, GREEDY.replaced(max_tokens=moe_server.config.max_model_len))
    async with clients_of(moe_server) as (binary, stock):
        await stock.identify()
        expected, completion = await binary.generate(asked), await stock.generate(asked)
    assert (completion.finish_reason, completion.token_ids.tolist()) == (
        expected.finish_reason,
        expected.token_ids.tolist(),
    )


def truncated_log_probabilities(
    server: ServerProcess, completion: Completion, sampling: SamplingParameters
) -> Float32Array:
    """Returns those of the completion's tokens: Hugging Face's logits over the temperature, cut by min-p, top-k and top-p."""
    import torch

    tokens = torch.tensor(np.concatenate([PROMPT, completion.token_ids]).astype(np.int64))
    with torch.no_grad():
        logits = server.models[0](tokens[None]).logits[0, len(PROMPT) - 1 : -1].float() / sampling.temperature
    p = logits.softmax(-1)
    logits[p < sampling.min_p * p.max(-1, keepdim=True).values] = -torch.inf
    if sampling.top_k:
        logits[logits < logits.topk(sampling.top_k).values[:, -1:]] = -torch.inf
    ordered, places = logits.softmax(-1).sort(-1, descending=True)
    beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
    logits[torch.zeros_like(beyond).scatter(-1, places, beyond)] = -torch.inf
    result: Float32Array = logits.log_softmax(-1).gather(-1, tokens[len(PROMPT) :, None])[:, 0].numpy()
    return result


@pytest.mark.parametrize(
    "cut", [{"top_p": 0.6}, {"top_k": 3}, {"min_p": 0.3}, {"top_p": 0.9, "top_k": 20, "min_p": 0.05}]
)
async def test_log_probabilities_are_those_of_the_distribution_that_was_sampled_from(
    moe_server: ServerProcess, cut: dict[str, Any]
) -> None:
    """So that they are the denominator of the importance ratio, whatever the distribution is cut to."""
    sampling = WARM.replaced(**cut)
    async with clients_of(moe_server) as clients:
        for client in clients:
            completion = await client.generate(request(moe_server, sampling))
            expected = truncated_log_probabilities(moe_server, completion, sampling)
            assert np.abs(completion.log_probabilities - expected).max() < TOLERANCE
            whole = truncated_log_probabilities(moe_server, completion, WARM)
            assert (whole - expected).min() < -0.01, "the whole distribution gives the same: nothing was cut"


async def test_a_schema_constrains_and_log_probabilities_are_those_after_it(moe_server: ServerProcess) -> None:
    """A token that the schema alone allows has probability 1."""
    tokenizer = Tokenizer.from_file(f"{moe_server.config.model}/tokenizer.json")
    schema = '{"const":"yes"}'
    async with clients_of(moe_server) as clients:
        for client in clients:
            completion = await client.generate(request(moe_server, WARM.replaced(json_schema=schema)))
            written = tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
            assert written.strip() == '"yes"'
            assert completion.log_probabilities.max() <= 0
            whole = truncated_log_probabilities(moe_server, completion, WARM)
            assert (completion.log_probabilities >= whole - TOLERANCE).all()
            assert completion.log_probabilities.sum() > whole.sum() + 1
            with pytest.raises(RequestRefused):
                await client.generate(request(moe_server, WARM.replaced(json_schema='{"type":"nothing"}')))


@pytest.mark.parametrize("cut", [{}, {"top_k": 3}])
async def test_the_most_probable_tokens_come_beside_the_sampled_ones_and_change_nothing(
    moe_server: ServerProcess, cut: dict[str, Any]
) -> None:
    sampling = WARM.replaced(alternatives=5, **cut)
    async with clients_of(moe_server) as clients:
        for client in clients:
            asked = request(moe_server, sampling)
            completion = await client.generate(asked)
            completion.check(asked)
            assert completion.alternatives is not None
            expected = truncated_log_probabilities(moe_server, completion, sampling)
            assert np.abs(completion.log_probabilities - expected).max() < TOLERANCE
            ids_TK, values_TK = completion.alternatives.token_ids_TK, completion.alternatives.log_probabilities_TK
            assert (values_TK[:, :-1] >= values_TK[:, 1:]).all()
            is_sampled_TK = ids_TK == completion.token_ids[:, None]
            found_T = is_sampled_TK.any(axis=1)
            assert found_T.any()
            assert (values_TK[is_sampled_TK] == completion.log_probabilities[found_T]).all()
            assert (completion.log_probabilities[~found_T] <= values_TK[~found_T, -1]).all()
            if cut:
                assert found_T.all()
                assert np.abs(np.exp(values_TK.clip(min=-9999)).sum(axis=1) - 1).max() < TOLERANCE
            free = await client.generate(request(moe_server, GREEDY.replaced(alternatives=5)))
            plain = await client.generate(request(moe_server, GREEDY))
            assert free.token_ids.tolist() == plain.token_ids.tolist()
            assert plain.alternatives is None


async def test_a_seed_gives_the_same_completion_also_where_the_prompt_is_prefilled_in_parts(
    moe_server: ServerProcess,
) -> None:
    """A CPU's generators cannot be turned back, as vLLM does after each part. More tokens come at once than a step takes."""
    prompt = np.resize(PROMPT, 400).astype(np.int32)
    sampling = SamplingParameters(temperature=1.0, max_tokens=24, seed=3)
    async with clients_of(moe_server) as clients:
        found = []
        for client in clients:
            for seed in (3, 3, 4):
                asked = [
                    replace(
                        request(moe_server, sampling.replaced(seed=seed)),
                        prompt_ids=np.append([first], prompt).astype(np.int32),
                    )
                    for first in range(5, 21)
                ]
                beside = [replace(each, sampling=sampling.replaced(seed=0), request_id=b"0" * 16) for each in asked]
                answers = await asyncio.gather(*(client.generate(each) for each in asked + beside))
                found.append([each.token_ids.tolist() for each in answers[: len(asked)]])
    assert found[0] == found[1] == found[3] == found[4]
    assert found[2] == found[5] != found[0]


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
async def test_log_probabilities_tell_the_servers_mode_apart(mode: str, tmp_path: Path) -> None:
    """Those of vLLM's default are the same at any temperature."""
    make_model(tmp_path / "model", moe=False, seed=0)
    config = tiny_config(tmp_path / "model", tmp_path)
    for server in run_server(config, [], [], "--logprobs-mode", mode):
        async with HttpSessions(PoolConfig()) as connections:
            found = await ignores_temperature(OpenAIClient(server.url, connections), server.config.model)
        assert found is (mode == "raw_logprobs")
