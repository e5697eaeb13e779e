"""Samples of the SDK's `asample`, at the job's servers.

Log-probabilities of samples are of the tempered distribution that was sampled, those of prompts of the model's distribution.
"""

from __future__ import annotations

import asyncio
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from pydantic import ValidationError

from counterpoint.inference.base import SamplingParameters
from counterpoint.service.records.structs import SamplerRecord
from counterpoint.service.samplers import Metered, affinity
from counterpoint.service.tinker.datums import MOST_TARGETS
from counterpoint.service.tinker.proto import LENGTH, MESSAGES, STOP
from counterpoint.service.tinker.refusals import BadRequest
from counterpoint.service.tinker.samples.prompts import MOST_CALLS, PromptPlaces, Score, Targets, Tensor, drawn
from counterpoint.transport.records import MOST_ALTERNATIVES, Alternatives, Float32Array, Int32Array, Turn

MOST_SAMPLES = 1024
"""Samples of one request."""

_COLDEST, _HOTTEST = 0.01, 2.0
"""vLLM's bounds of a temperature. Below the first only the most probable token is sampled."""


_NO_LOGPROB = -99_999.0
"""The SDK's value, with token 0, in place of a token that could not be sampled."""

_NEVER = -9000.0
"""Log-probabilities below are of tokens that could not be sampled (`Alternatives`)."""


class Chunk(msgspec.Struct, frozen=True):
    """A part of a prompt."""

    type: str = "encoded_text"
    tokens: list[int] = []


class Prompt(msgspec.Struct, frozen=True):
    """A prompt."""

    chunks: list[Chunk]


class Parameters(msgspec.Struct, frozen=True):
    """The sampling parameters."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleRequest(msgspec.Struct, frozen=True):
    """The body of `asample`."""

    sampling_session_id: str
    seq_id: Annotated[int, Meta(ge=0, lt=2**62)]
    prompt: Prompt
    sampling_params: Parameters
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Tensor | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


def prompt_of(asked: SampleRequest, longest: int) -> tuple[Int32Array, SamplingParameters]:
    """Returns the prompt of a request, and its sampling. Raises `BadRequest` for parts that the service does not serve."""
    if asked.record_stability_info:
        raise BadRequest(
            "record_stability_info is not served; it is for the loss stable_reinforce, in whose place ppo, cispo or gspo can be "
            "given"
        )
    for name in ("topk_sample_logprobs", "topk_prompt_logprobs"):
        if not 0 <= (count := getattr(asked, name)) <= MOST_ALTERNATIVES:
            raise BadRequest(f"{name} = {count}; expected 0 to {MOST_ALTERNATIVES}")
    if (seed := asked.sampling_params.seed) is not None and not -(2**63) <= seed < 2**63:
        raise BadRequest(f"sampling_params.seed = {str(seed)[:40]}; expected a number of 64 bits")
    if any(chunk.type != "encoded_text" for chunk in asked.prompt.chunks):
        raise BadRequest("the prompt has a chunk that is no text; only text is served")
    if not 1 <= asked.num_samples <= MOST_SAMPLES:
        raise BadRequest(f"num_samples = {asked.num_samples}; expected 1 to {MOST_SAMPLES}")
    if (
        length := sum(len(chunk.tokens) for chunk in asked.prompt.chunks)
    ) >= longest:  # before anything long is made of it
        raise BadRequest(f"the prompt has {length} tokens; with a completion there may be {longest}")
    tokens = [token for chunk in asked.prompt.chunks for token in chunk.tokens]
    if not tokens or min(tokens) < 0 or max(tokens) >= 2**31:
        raise BadRequest("the prompt has no token, or one that is none of the model's")
    if asked.prompt_logprobs_last_n is not None and not 1 <= asked.prompt_logprobs_last_n < len(tokens):
        raise BadRequest(
            f"prompt_logprobs_last_n = {asked.prompt_logprobs_last_n}; expected 1 to {len(tokens) - 1}: the prompt has "
            f"{len(tokens)} tokens"
        )
    parameters = _parameters(asked.sampling_params, longest - len(tokens), asked.topk_sample_logprobs)
    return np.array(tokens, np.int32), parameters


def _parameters(given: Parameters, room: int, alternatives: int) -> SamplingParameters:
    stop = [given.stop] if isinstance(given.stop, str) else (given.stop or [])
    if not 0 <= given.temperature <= _HOTTEST:
        raise BadRequest(f"temperature = {given.temperature}; expected 0 to {_HOTTEST:g}")
    if given.top_k < -1:
        raise BadRequest(f"top_k = {given.top_k}; expected a number of tokens, or -1 for all")
    if given.max_tokens is not None and given.max_tokens > room:
        raise BadRequest(f"max_tokens = {given.max_tokens}; after this prompt there is room for {room}")
    try:
        return SamplingParameters(
            temperature=max(given.temperature, _COLDEST),
            max_tokens=given.max_tokens if given.max_tokens is not None else room,
            top_p=given.top_p,
            top_k=max(given.top_k, 0),
            stop=[each for each in stop if isinstance(each, str)],
            stop_token_ids=[each for each in stop if isinstance(each, int)],
            ignore_eos=given.stop == [],
            alternatives=alternatives,
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise BadRequest(f"sampling_params.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


async def sample(
    servers: Metered, sampler: SamplerRecord, asked: SampleRequest, longest: int, score: Score
) -> tuple[bytes, list[Turn]]:
    """Returns the `SampleResponse` of a request, and its samples.

    Raises `BadRequest`, and the errors of `Samplers.sample` and `score`.

    `score` is that of the sampler's adapter, if it has one.
    """
    prompt, parameters = prompt_of(asked, longest)
    first = max(1, len(prompt) - (asked.prompt_logprobs_last_n or len(prompt)))
    targets = None
    if (given := asked.target_prompt_logprobs) is not None:  # there may be millions
        targets = await asyncio.to_thread(Targets, given, len(prompt))
    _check_calls(asked, prompt, first, targets, has_adapter=bool(sampler.adapter))
    adapter = (sampler.adapter, Path(sampler.directory)) if sampler.adapter else None
    name = partial(affinity, sampler.sampler_id.replace("-", "."), asked.seq_id)
    seed = asked.sampling_params.seed
    # Not a list: most of the requests that wait have begun none of their thousand samples.
    calls = ((prompt, _seeded(parameters, seed, index), name(index)) for index in range(asked.num_samples))
    async with asyncio.TaskGroup() as tasks:
        sampled = tasks.create_task(servers.turns(adapter, calls))
        scored: asyncio.Task[Float32Array] | None = None
        if asked.prompt_logprobs and len(prompt) > 1:
            scored = tasks.create_task(score(prompt, None) if adapter else _scored(servers, prompt, first, name(0)))
    response, turns = MESSAGES["SampleResponse"](), sampled.result()
    for turn in turns:
        _add(response, turn)
    if asked.prompt_logprobs:
        rest = scored.result()[first - len(prompt) :] if scored is not None else np.zeros(0, np.float32)
        unscored = np.full(len(prompt) - len(rest), np.nan, np.float32)
        response.prompt_logprobs = np.append(unscored, rest).astype(np.float32).tobytes()
    places = PromptPlaces(servers, adapter, prompt, score, name(0), lambda each, name: _seeded(each, seed, name))
    if asked.topk_prompt_logprobs:
        found = await places.most_probable(first, asked.topk_prompt_logprobs)
        _add_top(response.topk_prompt_logprobs, found, first, asked.topk_prompt_logprobs)
    if targets is not None:
        values = await places.log_probabilities(targets.places, targets.ids)
        response.target_prompt_logprobs.CopyFrom(targets.answer(values))
    if asked.prompt_alt_tokens_k:
        draws = await places.draws(asked.prompt_alt_tokens_k, parameters.temperature)
        response.prompt_alt_tokens.CopyFrom(drawn(*draws))
    encoded: bytes = response.SerializeToString()
    return encoded, turns


async def _scored(servers: Metered, prompt: Int32Array, first: int, affinity: str) -> Float32Array:
    return (await servers.scores([(prompt, first, affinity)]))[0]


def _check_calls(
    asked: SampleRequest, prompt: Int32Array, first: int, targets: Targets | None, *, has_adapter: bool
) -> None:
    """Raises `BadRequest` if a request needs too many calls to the servers for its prompt."""
    draws = max(1, len(prompt) - 1) * asked.prompt_alt_tokens_k  # also of one token: it bounds the answer's shape
    if draws < 0:
        raise BadRequest(f"prompt_alt_tokens_k = {asked.prompt_alt_tokens_k}; expected 0 or more")
    calls = draws + (len(prompt) - first) * bool(asked.topk_prompt_logprobs)
    if not has_adapter:
        calls += (targets.calls if targets else 0) + draws * (asked.sampling_params.temperature != 1)
    if calls > MOST_CALLS:
        raise BadRequest(
            f"topk_prompt_logprobs, target_prompt_logprobs and prompt_alt_tokens_k take {calls} calls to the servers, one for "
            f"each token of the prompt, target and draw; at most {MOST_CALLS}: ask for fewer at once"
        )
    if has_adapter and asked.prompt_alt_tokens_k > MOST_TARGETS:
        raise BadRequest(f"prompt_alt_tokens_k = {asked.prompt_alt_tokens_k}; expected at most {MOST_TARGETS}")


def most_used(asked: SampleRequest, longest: int) -> int:
    """Returns the most tokens that a request may use, with its prompt. One that is refused later uses none of them."""
    prompt = min(sum(len(chunk.tokens) for chunk in asked.prompt.chunks), longest)
    given, places = asked.sampling_params.max_tokens, max(0, prompt - 1)
    each = longest - prompt if given is None else min(max(given, 0), longest - prompt)
    told = places * (bool(asked.topk_prompt_logprobs) + 2 * max(asked.prompt_alt_tokens_k, 0))
    targets = len(asked.target_prompt_logprobs.data) if asked.target_prompt_logprobs is not None else 0
    return prompt + max(0, min(asked.num_samples, MOST_SAMPLES)) * each + min(told + targets, MOST_CALLS)


def _seeded(parameters: SamplingParameters, seed: int | None, name: object) -> SamplingParameters:
    """Returns the parameters of one sample of a request: each has another seed, which the request's determines."""
    if seed is None:
        return parameters
    given = blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return parameters.replaced(seed=int.from_bytes(given) >> 1 or 1)


def _add(response: Any, turn: Turn) -> None:
    sequence = response.sequences.add(
        stop_reason=STOP if turn.finish_reason == "stop" else LENGTH,
        tokens=turn.completion_ids.astype(np.int32).tobytes(),
        logprobs=turn.log_probabilities.astype(np.float32).tobytes(),
    )
    if turn.alternatives is not None:
        _add_top(sequence.topk_sampled_logprobs, [turn.alternatives], 0, turn.alternatives.token_ids_TK.shape[1])


def _add_top(message: Any, found: list[Alternatives], skipped: int, count: int) -> None:
    """Adds the most probable tokens of places, after `skipped` ones without any."""
    ids = np.concatenate([np.zeros((skipped, count), np.int32), *(each.token_ids_TK for each in found)])
    none = np.full((skipped, count), _NO_LOGPROB, np.float32)
    values = np.concatenate([none, *(each.log_probabilities_TK for each in found)])
    possible = values > _NEVER
    message.token_ids = np.where(possible, ids, 0).astype(np.int32).tobytes()
    message.logprobs = np.where(possible, values, _NO_LOGPROB).astype(np.float32).tobytes()
    message.length, message.k = ids.shape
