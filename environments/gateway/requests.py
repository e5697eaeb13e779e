"""Checks the fields of chat and completions requests: each is honoured, documented as ignored, or refused.

`docs/gateway.md` has the table of them.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import ValidationError

from environments.chat import Message, Tool
from environments.gateway.constraints import calls_schema, demanded_tools, response_schema
from environments.gateway.errors import Refused
from environments.gateway.messages import template_messages, template_tools
from environments.messages import shown
from environments.sampling import (
    LONGEST_STOP,
    MOST_STOPS,
    SAMPLED,
    SHAPING,
    CallOverrides,
    SamplingConfig,
    SamplingOverrides,
)

MOST_CHOICES = 16
"""Turns of one request: `n` times its prompts."""

_RAISED: dict[str, tuple[float, float]] = {"temperature": (0.0, 0.01), "top_p": (0.0, 1e-6), "top_k": (-1, 0)}
"""What agents give for greedy decoding or for all tokens, and the least value that is used: a number from the first on becomes at
least the second. Log-probabilities to train on need a distribution, for which vLLM's 0 is none."""

_IGNORED = frozenset(
    {
        "metadata", "model", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "seed", "service_tier",
        "store", "user",
    }
)  # fmt: skip
_SHARED = frozenset(
    {
        "frequency_penalty", "logit_bias", "logprobs", "n", "presence_penalty", "stream", "stream_options",
    }
) | SAMPLED  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "suffix": ("",),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields that cannot be honoured, and the values besides null that ask for nothing."""

_CHAT = frozenset(
    {
        "audio", "function_call", "functions", "max_completion_tokens", "messages", "modalities", "parallel_tool_calls",
        "prediction", "reasoning_effort", "response_format", "tool_choice", "tools", "top_logprobs", "verbosity",
        "web_search_options",
    }
)  # fmt: skip
_COMPLETION = frozenset({"best_of", "echo", "prompt", "suffix"})


@dataclass(frozen=True, slots=True)
class Asked:
    """What chat and completions requests have in common."""

    overrides: SamplingOverrides
    """What replaces the environment's sampling parameters."""
    stop: tuple[str, ...]
    """The agent's own stop strings, which are cut from its answer."""
    choices: int
    """Turns from each prompt."""
    stream: bool
    include_usage: bool
    """A stream ends with its usage."""
    log_probabilities: bool


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request of the chat API."""

    messages: list[Message]
    tools: list[Tool]
    """Those in the prompt."""
    parsed_tools: list[Tool]
    """Those whose calls are parsed: none with `tool_choice = "none"`."""
    demanded_tools: list[Tool]
    """Those one of which must be called; none where the model is free. The calls are JSON then (`constraints.calls_schema`)."""
    one_call: bool
    """An answer has at most one call."""
    asked: Asked


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request of the completions API."""

    prompts: list[str | list[int]]
    asked: Asked


def chat_request(fields: dict[str, Any], sampling: SamplingConfig, *, agent_sampling: bool) -> ChatRequest:
    """Returns the request in `fields`. `sampling` is the environment's. Raises `Refused`."""
    _check_names(fields, _CHAT)
    messages = template_messages(fields.get("messages"))
    tools = template_tools(fields.get("tools"))
    log_probabilities = _flag(fields, "logprobs")
    one_call = fields.get("parallel_tool_calls") is not None and not _flag(fields, "parallel_tool_calls")
    schema = response_schema(fields.get("response_format"))
    if demanded := demanded_tools(fields.get("tool_choice"), tools):
        if schema:
            _refuse(fields, "tool_choice", "a call cannot be demanded together with a response_format")
        is_one = one_call or fields.get("tool_choice") != "required"
        schema = calls_schema(demanded, parallel=not is_one)
    asked = _asked(fields, sampling, agent_sampling=agent_sampling, log_probabilities=log_probabilities, schema=schema)
    parsed_tools = [] if fields.get("tool_choice") == "none" else tools
    return ChatRequest(messages, tools, parsed_tools, demanded, one_call, asked)


def completion_request(
    fields: dict[str, Any], sampling: SamplingConfig, vocabulary: int, *, agent_sampling: bool
) -> CompletionRequest:
    """Returns the request in `fields`. `vocabulary` bounds token ids. Raises `Refused`."""
    _check_names(fields, _COMPLETION)
    if fields.get("logprobs") not in (None, 0):
        _refuse(fields, "logprobs", "only 0, the log-probabilities of the sampled tokens, can be had")
    log_probabilities = fields.get("logprobs") is not None
    asked = _asked(fields, sampling, agent_sampling=agent_sampling, log_probabilities=log_probabilities)
    prompts = _prompts(fields.get("prompt"), vocabulary)
    if len(prompts) * asked.choices > MOST_CHOICES:
        raise Refused(
            f"{len(prompts)} prompts with n = {asked.choices}: at most {MOST_CHOICES} completions are made at once",
            parameter="prompt",
        )
    return CompletionRequest(prompts, asked)


def _check_names(fields: dict[str, Any], own: frozenset[str]) -> None:
    known = own | _SHARED | _IGNORED
    for name, value in fields.items():
        if name not in known:
            nearest = difflib.get_close_matches(name[:64], sorted(known), n=1)
            advice = f"did you mean {nearest[0]!r}?" if nearest else "leave it out"
            raise Refused(f"{name[:64]!r} is not a field that can be honoured; {advice}", parameter=name[:64])
        if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]:
            allowed = ", ".join(map(repr, _NEUTRAL[name]))
            _refuse(
                fields, name, f"it cannot be honoured; {f'give {allowed}, or leave' if allowed else 'leave'} it out"
            )


def _asked(
    fields: dict[str, Any],
    sampling: SamplingConfig,
    *,
    agent_sampling: bool,
    log_probabilities: bool,
    schema: str = "",
) -> Asked:
    stop = _stop(fields)
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict) or not options.keys() <= {"include_usage", "include_obfuscation"}:
        _refuse(fields, "stream_options", 'expected {"include_usage": true}')
    shaping = _shaping(fields)
    overrides = {**(shaping if agent_sampling else {}), "max_tokens": _most_tokens(fields, sampling)}
    if stop:
        overrides["stop"] = [*sampling.stop, *(each for each in stop if each not in sampling.stop)]
        if len(overrides["stop"]) > MOST_STOPS:
            _refuse(fields, "stop", f"with those of the environment at most {MOST_STOPS} strings are taken")
    return Asked(
        CallOverrides(**overrides, json_schema=schema) if schema else SamplingOverrides(**overrides),
        stop,
        choices=_whole(fields, "n", 1, MOST_CHOICES) or 1,
        stream=_flag(fields, "stream"),
        include_usage=options.get("include_usage") is True,
        log_probabilities=log_probabilities,
    )


def _most_tokens(fields: dict[str, Any], sampling: SamplingConfig) -> int:
    given = [_whole(fields, name, 1, 2**31) for name in ("max_tokens", "max_completion_tokens")]
    return min([sampling.max_tokens, *(each for each in given if each is not None)])


def _shaping(fields: dict[str, Any]) -> dict[str, Any]:
    """Those of the agent's sampling parameters that shape the distribution. They are checked also where they are ignored."""
    found: dict[str, Any] = {}
    for name in SHAPING:
        value = fields.get(name)
        if value is None:
            continue
        least, used = _RAISED.get(name, (0, 0))
        if type(value) in (int, type(used)) and least <= value < used:
            value = used
        try:
            found |= SamplingOverrides.model_validate({name: value}, strict=True).model_dump(exclude_none=True)
        except ValidationError as error:
            _refuse(fields, name, error.errors(include_url=False)[0]["msg"])
    return found


def _stop(fields: dict[str, Any]) -> tuple[str, ...]:
    value = fields.get("stop")
    strings = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or len(strings) > MOST_STOPS:
        _refuse(fields, "stop", f"expected a string or a list of at most {MOST_STOPS}")
    if not all(isinstance(each, str) and 0 < len(each) <= LONGEST_STOP for each in strings):
        _refuse(fields, "stop", f"expected strings of 1 to {LONGEST_STOP} characters")
    return tuple(strings)


def _prompts(value: object, vocabulary: int) -> list[str | list[int]]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise Refused(
            f"prompt is {shown(value)}; expected text, a list of token ids, or a list of either", parameter="prompt"
        )
    if isinstance(value[0], int):
        return [_token_ids(value, vocabulary)]
    if len(value) > MOST_CHOICES:
        raise Refused(f"{len(value)} prompts; at most {MOST_CHOICES} are taken", parameter="prompt")
    return [each if isinstance(each, str) else _token_ids(each, vocabulary) for each in value]


def _token_ids(value: object, vocabulary: int) -> list[int]:
    if isinstance(value, list) and value and all(type(each) is int and 0 <= each < vocabulary for each in value):
        return value
    raise Refused(
        f"prompt has {shown(value)}; expected text or token ids from 0 to {vocabulary - 1}", parameter="prompt"
    )


def _whole(fields: dict[str, Any], name: str, least: int, most: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not int or not least <= value <= most:
        _refuse(fields, name, f"expected a whole number from {least} to {most}")
    return value


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        _refuse(fields, name, "expected true or false")
    return bool(value)


def _refuse(fields: dict[str, Any], name: str, expected: str) -> NoReturn:
    raise Refused(f"{name} is {shown(fields.get(name))}; {expected}", parameter=name)
