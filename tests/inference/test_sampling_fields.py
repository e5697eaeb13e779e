"""Each sampling parameter reaches vLLM as it was given, or is refused, by our route and by vLLM's.

The fields are those of `Sampling`: a new one is tested as soon as it is declared.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from counterpoint.environments.chat import Chat
from counterpoint.environments.gateway.errors import GatewayRefused
from counterpoint.environments.gateway.requests import chat_request
from counterpoint.environments.sampling import (
    SAMPLED,
    SHAPING,
    CallOverrides,
    Sampling,
    SamplingConfig,
    SamplingOverrides,
)
from counterpoint.inference import wire
from counterpoint.inference.base import OPTIONAL_PARAMETERS, GenerateRequest, SamplingParameters, ScoreRequest
from counterpoint.inference.clients import openai_client
from counterpoint.orchestrator.rollouts.play import _overridden, sampling_parameters
from counterpoint.transport.records import MOST_ALTERNATIVES
from tests.support.fake_inference import with_sampling

DEFAULTS = {"temperature": 0.3, "top_p": 0.2, "top_k": 3, "min_p": 0.4, "repetition_penalty": 1.7}
"""What a model's `generation_config.json` may say, which no request leaves to it."""

EACH: dict[str, st.SearchStrategy[Any]] = {
    name: st.from_type(cast(Any, field.rebuild_annotation())) for name, field in Sampling.model_fields.items()
} | {"stop": st.lists(st.text(min_size=1, max_size=256), max_size=4)}
"""Values within the bounds. By itself (`VLLM_MAX_STOP_STRINGS`), vLLM's own route takes at most four stop strings."""
VALUES = st.fixed_dictionaries({}, optional=EACH)
ANYTHING = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text() | st.lists(st.text())


class Template:
    """The part of `Chat` that sampling depends on."""

    stop_token_ids = (7, 2)


@pytest.fixture(scope="module")
def vllm() -> None:
    """Imports vLLM, which takes seconds, as its server does: without functions that torch compiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")

        import counterpoint.inference.plugin.routes  # noqa: F401


def request_of(sampling: SamplingParameters) -> GenerateRequest:
    return GenerateRequest("m", np.array([1, 2], dtype=np.int32), sampling, 1)


def at_our_route(body: bytes) -> Any:
    """The `SamplingParams` that the plugin gives the engine for a body."""
    from counterpoint.inference.plugin.routes import CounterpointRoutes

    class Recorded(CounterpointRoutes):
        async def _run(self, model: str, prompts: Any, *_arguments: Any, **_keywords: Any) -> None:
            [(_, self.sampling)] = prompts

    routes = Recorded()
    routes.vocabulary_size = 1000
    assert asyncio.run(routes._complete(wire.decode_request(body), None)) == b""
    return routes.sampling


def bodies_of_the_stock_client(request: GenerateRequest) -> list[bytes]:
    """What `OpenAIClient` sends to complete, to score and to probe."""
    sent: list[bytes] = []

    class Sent(Exception):
        pass

    async def record(_session: object, _url: str, body: bytes) -> bytes:
        sent.append(body)
        raise Sent

    class Sessions:
        data = admin = None

    client = openai_client.OpenAIClient("http://server", cast(Any, Sessions()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai_client, "call", record)
        for asked in (
            client.generate(request),
            client.score(ScoreRequest("m", request.prompt_ids, 1)),
            client.probe("m", [1, 2]),
        ):
            with pytest.raises(Sent):
                asyncio.run(cast(Any, asked))
    return sent


def at_vllms_route(body: bytes) -> Any:
    """The `SamplingParams` that vLLM's own completions route makes of a body."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    request = CompletionRequest.model_validate(orjson.loads(body))
    return request.to_sampling_params(request.max_tokens, DEFAULTS)


def assert_given(params: Any, expected: SamplingParameters) -> None:
    for name, value in expected.named.items():
        assert getattr(params, name) == value, name
    schema = params.structured_outputs.json if params.structured_outputs else ""
    assert schema == expected.json_schema
    assert params.logprobs == expected.alternatives
    assert params.seed == (expected.seed or None)
    assert params.repetition_penalty == 1.0


@pytest.mark.slow
@pytest.mark.usefixtures("vllm")
@given(
    VALUES,
    VALUES,
    st.sampled_from(["", '{"type":"string"}']),
    st.integers(0, MOST_ALTERNATIVES),
    st.integers(0, 2**63 - 1),
)
def test_what_is_configured_reaches_vllm_by_both_routes(
    run: dict[str, Any], call: dict[str, Any], schema: str, alternatives: int, seed: int
) -> None:
    overrides = CallOverrides(**call, json_schema=schema, alternatives=alternatives)
    sampling = _overridden(sampling_parameters(SamplingConfig(**run), cast(Chat, Template())), overrides)
    neutral = {name: field.default for name, field in Sampling.model_fields.items()}
    expected = {**neutral, **run, **call, "stop_token_ids": [7, 2], "ignore_eos": False}
    expected |= {"json_schema": schema, "alternatives": alternatives, "seed": 0}
    assert sampling.model_dump() == expected
    sampling = sampling.replaced(seed=seed)
    request = request_of(sampling)
    assert_given(at_our_route(wire.encode_request(request)), sampling)
    completion, *measuring = bodies_of_the_stock_client(request)
    assert_given(at_vllms_route(completion), sampling)
    for body in measuring:
        params = at_vllms_route(body)
        assert {name: getattr(params, name) for name in SHAPING} == {name: neutral[name] for name in SHAPING}


@pytest.mark.slow
@pytest.mark.usefixtures("vllm")
@given(st.fixed_dictionaries({}, optional={name: EACH[name] for name in SHAPING}))
def test_what_an_agent_may_ask_reaches_vllm(asked: dict[str, Any]) -> None:
    fields = {"messages": [{"role": "user", "content": "hello"}], **asked}
    plain = sampling_parameters(SamplingConfig(), cast(Chat, Template()))
    overrides = chat_request(fields, SamplingConfig(), cast(Chat, None), agent_sampling=True).asked.overrides
    raised = {"top_p": max(asked["top_p"], 1e-6)} if "top_p" in asked else {}
    expected = plain.replaced(**asked | raised)
    assert_given(at_our_route(wire.encode_request(request_of(_overridden(plain, overrides)))), expected)


@given(st.sampled_from(sorted(SamplingParameters.model_fields)), ANYTHING)
def test_a_wrong_value_is_refused_by_the_wire_with_its_field(name: str, value: Any) -> None:
    request = request_of(SamplingParameters())
    try:
        read = wire.decode_request(with_sampling(request, {**request.sampling.named, name: value})).sampling
    except ValueError as error:
        assert str(error).startswith(name)  # noqa: PT017 - whether it is refused is the value's
    else:
        assert (getattr(read, name), type(value)) in ((value, type(getattr(read, name))), (value, int))


@given(st.sampled_from(SHAPING), ANYTHING)
def test_a_wrong_value_of_an_agent_is_refused_with_its_field(name: str, value: Any) -> None:
    fields = {"messages": [{"role": "user", "content": "hello"}], name: value}
    try:
        overrides = chat_request(fields, SamplingConfig(), cast(Chat, None), agent_sampling=True).asked.overrides
    except GatewayRefused as error:
        assert error.parameter == name  # noqa: PT017 - whether it is refused is the value's
    else:
        used = getattr(overrides, name)
        assert used == value or value is None or (value < used and not isinstance(value, bool))


@pytest.mark.parametrize("name", sorted(SamplingParameters.model_fields.keys() - set(OPTIONAL_PARAMETERS)))
def test_a_request_that_lacks_a_field_is_refused(name: str) -> None:
    request = request_of(SamplingParameters())
    fields = {each: value for each, value in request.sampling.named.items() if each != name}
    with pytest.raises(ValueError, match=f"^{name}: "):
        wire.decode_request(with_sampling(request, fields))


def test_a_field_that_the_server_does_not_know_is_refused_and_not_ignored() -> None:
    request = request_of(SamplingParameters())
    with pytest.raises(ValueError, match=r"^presence_penalty = 0\.5: "):
        wire.decode_request(with_sampling(request, {**request.sampling.named, "presence_penalty": 0.5}))


@pytest.mark.parametrize("kind", [SamplingConfig, SamplingOverrides, SamplingParameters])
@pytest.mark.parametrize("name", sorted(SAMPLED))
def test_no_number_is_one_that_is_not_finite(kind: type[Sampling], name: str) -> None:
    for value in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(ValidationError, match=name):
            kind.model_validate({name: value})


def test_a_field_has_its_meaning_also_where_it_overrides() -> None:
    from counterpoint.transport.configuration.docstrings import docstring_of

    for name in SAMPLED:
        assert docstring_of(SamplingOverrides, name) == docstring_of(Sampling, name) != ""
        assert SamplingOverrides.model_fields[name].default is None
