"""Checks the fields of chat and completions requests: each is served, documented as ignored, or refused.

`docs/gateway.md` has the table of them, which a test compares with OpenAI's own list.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import ValidationError

from counterpoint.environments.chat import Chat, Message, Tool
from counterpoint.environments.gateway.constraints import calls_schema, demanded_tools, response_schema
from counterpoint.environments.gateway.errors import GatewayRefused
from counterpoint.environments.gateway.json_body import is_one_of
from counterpoint.environments.gateway.messages import template_messages, template_tools
from counterpoint.environments.messages import shown
from counterpoint.environments.sampling import (
    LONGEST_STOP,
    MOST_STOPS,
    SAMPLED,
    SHAPING,
    CallOverrides,
    SamplingConfig,
    SamplingOverrides,
)
from counterpoint.transport.records import MOST_ALTERNATIVES

MOST_CHOICES = 16
"""Turns of one request: `n` times its prompts."""

MOST_ALTERNATIVES_OF_REQUEST = 400_000
"""Most probable tokens of all its turns together. Each takes some 600 bytes while the answer is written."""

_RAISED: dict[str, tuple[float, float]] = {"temperature": (0.0, 0.01), "top_p": (0.0, 1e-6), "top_k": (-1, 0)}
"""What agents give for greedy decoding or for all tokens, and the least value that is used: a number from the first on becomes at
least the second. Log-probabilities to train on need a distribution, for which vLLM's 0 is none."""

_IGNORED = frozenset(
    {
        "metadata", "model", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
        "safety_identifier", "seed", "service_tier", "store", "user",
    }
)  # fmt: skip
_SHARED = frozenset(
    {
        "frequency_penalty", "logit_bias", "logprobs", "n", "presence_penalty", "stream", "stream_options",
    }
) | SAMPLED  # fmt: skip
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The reasoning efforts of vLLM and of OpenAI."""
_VERBOSITIES = ("low", "medium", "high")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "presence_penalty": (0,),
    "suffix": ("",),
    "web_search_options": (),
}
"""Fields that cannot be served, and the values besides null that ask for nothing."""
_OTHER_DISTRIBUTION = "the trainer's model would not sample from the same distribution; leave it out"
_REASONS = {
    "audio": "only text is served; leave it out",
    "frequency_penalty": _OTHER_DISTRIBUTION,
    "function_call": "calls are asked for by tool_choice",
    "functions": "functions are given as tools",
    "logit_bias": _OTHER_DISTRIBUTION,
    "modalities": 'only text is served; give ["text"], or leave it out',
    "moderation": "nothing here moderates; leave it out",
    "presence_penalty": _OTHER_DISTRIBUTION,
    "web_search_options": "no search of the web is served; give the model a tool of yours",
}

_CHAT = frozenset(
    {
        "audio", "function_call", "functions", "max_completion_tokens", "messages", "modalities", "moderation",
        "parallel_tool_calls", "reasoning_effort", "response_format", "tool_choice", "tools", "top_logprobs", "verbosity",
        "web_search_options",
    }
)  # fmt: skip
_COMPLETION = frozenset({"best_of", "echo", "prompt", "suffix"})


@dataclass(frozen=True, slots=True)
class Asked:
    """What chat and completions requests have in common."""

    overrides: CallOverrides
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
    template_kwargs: dict[str, Any]
    """All variables of the chat template, if its effort or verbosity sets one. Empty: the environment's."""
    asked: Asked


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request of the completions API."""

    prompts: list[str | list[int]]
    asked: Asked


def chat_request(fields: dict[str, Any], sampling: SamplingConfig, chat: Chat, *, agent_sampling: bool) -> ChatRequest:
    """Returns the request in `fields`. `sampling` and `chat` are the environment's. Raises `GatewayRefused`."""
    _check_names(fields, _CHAT)
    messages = template_messages(fields.get("messages"))
    tools = template_tools(fields.get("tools"))
    log_probabilities, alternatives = _flag(fields, "logprobs"), _whole(fields, "top_logprobs", 0, MOST_ALTERNATIVES)
    if alternatives and not log_probabilities:
        _refuse(fields, "top_logprobs", "it needs logprobs = true")
    one_call = fields.get("parallel_tool_calls") is not None and not _flag(fields, "parallel_tool_calls")
    schema = response_schema(fields.get("response_format"))
    if demanded := demanded_tools(fields.get("tool_choice"), tools):
        if schema:
            _refuse(fields, "tool_choice", "a call cannot be demanded together with a response_format")
        is_one = one_call or fields.get("tool_choice") != "required"
        schema = calls_schema(demanded, parallel=not is_one)
    kwargs = _template_kwargs(fields, chat)
    call = {"json_schema": schema, "alternatives": alternatives or 0, "chat_template_kwargs": kwargs or None}
    asked = _asked(fields, sampling, call, agent_sampling=agent_sampling, log_probabilities=log_probabilities)
    parsed_tools = [] if fields.get("tool_choice") == "none" else tools
    return ChatRequest(messages, tools, parsed_tools, demanded, one_call, kwargs, asked)


def completion_request(
    fields: dict[str, Any], sampling: SamplingConfig, vocabulary: int, *, agent_sampling: bool
) -> CompletionRequest:
    """Returns the request in `fields`. `vocabulary` bounds token ids. Raises `GatewayRefused`."""
    _check_names(fields, _COMPLETION)
    alternatives = _whole(fields, "logprobs", 0, MOST_ALTERNATIVES)
    call = {"alternatives": alternatives or 0}
    prompts = _prompts(fields.get("prompt"), vocabulary)
    asked = _asked(
        fields,
        sampling,
        call,
        prompts=len(prompts),
        agent_sampling=agent_sampling,
        log_probabilities=alternatives is not None,
    )
    if len(prompts) * asked.choices > MOST_CHOICES:
        raise GatewayRefused(
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
            raise GatewayRefused(f"{name[:64]!r} is not a field that is served; {advice}", parameter=name[:64])
        if name in _NEUTRAL and value is not None and not is_one_of(value, _NEUTRAL[name]):
            allowed = ", ".join(map(repr, _NEUTRAL[name]))
            advice = _REASONS.get(name, f"{f'give {allowed}, or leave' if allowed else 'leave'} it out")
            _refuse(fields, name, f"it is not served: {advice}")


def _asked(
    fields: dict[str, Any],
    sampling: SamplingConfig,
    call: dict[str, Any],
    *,
    prompts: int = 1,
    agent_sampling: bool,
    log_probabilities: bool,
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
    choices = _whole(fields, "n", 1, MOST_CHOICES) or 1
    _check_alternatives(call["alternatives"], overrides["max_tokens"], prompts * choices)
    return Asked(
        CallOverrides(**overrides, **call),
        stop,
        choices=choices,
        stream=_flag(fields, "stream"),
        include_usage=_flag(options, "include_usage"),
        log_probabilities=log_probabilities,
    )


def _check_alternatives(alternatives: int, tokens: int, turns: int) -> None:
    if (found := alternatives * tokens * turns) > MOST_ALTERNATIVES_OF_REQUEST:
        raise GatewayRefused(
            f"{alternatives} most probable tokens for each of {tokens} in {turns} turns are {found}; at most "
            f"{MOST_ALTERNATIVES_OF_REQUEST} are returned: ask for fewer, or limit the tokens (`max_tokens`)",
            parameter="max_tokens",
        )


def _template_kwargs(fields: dict[str, Any], chat: Chat) -> dict[str, Any]:
    """Returns all variables of the template for this request if its effort or verbosity set one, else nothing.

    As vLLM does, an effort is the variables `reasoning_effort` and `enable_thinking`, which is false for `none`.
    """
    made: dict[str, Any] = {}
    effort, verbosity = (
        _one_of(fields, name, values) for name, values in (("reasoning_effort", _EFFORTS), ("verbosity", _VERBOSITIES))
    )
    if effort is not None:
        thinking = {} if "enable_thinking" in chat.template_kwargs else {"enable_thinking": effort != "none"}
        made |= _read(fields, "reasoning_effort", {"reasoning_effort": effort, **thinking}, chat)
    if verbosity is not None:
        made |= _read(fields, "verbosity", {"verbosity": verbosity}, chat)
    return {**chat.template_kwargs, **made} if made else {}


def _read(fields: dict[str, Any], name: str, variables: dict[str, Any], chat: Chat) -> dict[str, Any]:
    """Those of the variables that the template reads.

    Raises `GatewayRefused` if it reads none of them: they would change nothing.
    """
    if read := {each: variables[each] for each in variables if each in chat.template_variables}:
        return read
    known = ", ".join(sorted(chat.template_variables))
    _refuse(fields, name, f"the model's chat template does not read {' or '.join(variables)}; it reads {known}")


def _one_of(fields: dict[str, Any], name: str, values: tuple[str, ...]) -> str | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or value not in values:
        _refuse(fields, name, f"expected one of {', '.join(values)}")
    return value


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
        raise GatewayRefused(
            f"prompt is {shown(value)}; expected text, a list of token ids, or a list of either", parameter="prompt"
        )
    if isinstance(value[0], int):
        return [_token_ids(value, vocabulary)]
    if len(value) > MOST_CHOICES:
        raise GatewayRefused(f"{len(value)} prompts; at most {MOST_CHOICES} are taken", parameter="prompt")
    return [each if isinstance(each, str) else _token_ids(each, vocabulary) for each in value]


def _token_ids(value: object, vocabulary: int) -> list[int]:
    if isinstance(value, list) and value and all(type(each) is int and 0 <= each < vocabulary for each in value):
        return value
    raise GatewayRefused(
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
    raise GatewayRefused(f"{name} is {shown(fields.get(name))}; {expected}", parameter=name)
