"""The client of one stock vLLM server, in JSON: `/v1/completions` with token ids in and out, `/v1/load_lora_adapter`.

It costs more than the binary route (text, and base64 for routed experts), so a long answer is parsed in a thread. A stock
server can take new weights only as LoRA adapters. Each version gets an adapter name of its own, by which vLLM keys its
prefix cache, so that no prompt uses another version's keys and values, and a request in flight ends under the version it
began with. Since a run that is resumed, or another job, may give the same name to other weights, each client has a cache
salt, too.
"""

from __future__ import annotations

import asyncio
import io
import logging
import math
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pybase64

from counterpoint.environments.sampling import SHAPING, Sampling
from counterpoint.inference.base import (
    Completion,
    GenerateRequest,
    HeldWeights,
    ParsedText,
    RequestRefused,
    ScoreRequest,
    Scores,
    ServerFailure,
    ServerUnreachable,
    WeightsNotSeen,
    WeightUpdate,
)
from counterpoint.inference.clients.capacity import Observation
from counterpoint.inference.clients.client import (
    ServerIdentity,
    as_log_probabilities,
    as_object,
    detokenize,
    read_metrics,
)
from counterpoint.inference.clients.http_sessions import HttpSessions, call
from counterpoint.inference.cut_calls import stands_whole
from counterpoint.inference.loads import LoadClaim
from counterpoint.transport.exact_json import dumps
from counterpoint.transport.records import Alternatives, Float32Array, Int32Array, RoutingArray

logger = logging.getLogger(__name__)

PARSE_IN_THREAD_BYTES = 1 << 16
"""A longer answer is parsed off the loop."""

_NEVER = -9999.0
"""What vLLM answers in JSON for the log-probability of a token that has none."""

_ROUNDING = 1e-5

KEPT_ADAPTERS = 2
"""Versions of an adapter that stay loaded: the current one and the one that requests in flight may still name."""

_UNSHAPED = Sampling().model_dump(include=set(SHAPING))
"""What asks for the model's own distribution. A model may come with other defaults, so that each is sent."""


class OpenAIClient:
    """The client of a stock server."""

    def __init__(self, url: str, connections: HttpSessions) -> None:
        self.url = url
        self.reasons = False
        self._connections = connections
        self._adapters: dict[str, list[str]] = {}
        """Names at the server of each adapter's loaded versions, oldest first."""
        self._salt = secrets.token_hex(16)
        self._context: int | None = None
        """Most tokens of prompt and completion, if the server says so."""

    async def identify(self) -> ServerIdentity:
        """See `ServerClient`.

        A stock server reports no id of its instance; a restart is noticed when the server is unreachable.
        """
        try:
            await call(self._connections.admin, f"{self.url}/health", None)
        except ServerUnreachable:
            self._context = None  # it may come back with another one
            raise
        if self._context is None:
            await self._read_context()
        return ServerIdentity(self.url)

    async def _read_context(self) -> None:
        try:
            answer = as_object(await call(self._connections.admin, f"{self.url}/v1/models", None), self.url)
        except ServerUnreachable:
            raise
        except (RequestRefused, ServerFailure):  # a server that lists no models
            return
        models = answer.get("data")
        first = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
        context = first.get("max_model_len")
        self._context = context if isinstance(context, int) and context > 0 else None

    async def observe(self) -> Observation | None:
        """See `ServerClient`."""
        return await read_metrics(self._connections, self.url)

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `ServerClient`. A completion may fill the context, as by our route; vLLM's own refuses to be asked for more."""
        most = request.sampling.max_tokens
        if self._context is not None:
            most = min(most, max(1, self._context - len(request.prompt_ids)))
        schema = request.sampling.json_schema
        body = orjson.dumps(
            {
                "model": self._name(request.model),
                "prompt": np.ascontiguousarray(request.prompt_ids),
                "repetition_penalty": 1.0,
                **request.sampling.named,
                "max_tokens": most,
                # A stop string may be a special token.
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
                "logprobs": request.sampling.alternatives,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
                "routed_experts_prompt_start": request.routed_experts_start,
                "cache_salt": self._salt,
                **({"structured_outputs": {"json": schema}} if schema else {}),
                **({"seed": request.sampling.seed} if request.sampling.seed else {}),
            },
            option=orjson.OPT_SERIALIZE_NUMPY,
        )
        answer = await call(self._connections.data, f"{self.url}/v1/completions", body)
        if len(answer) > PARSE_IN_THREAD_BYTES:
            return await asyncio.to_thread(self._parse, answer, request.sampling.alternatives)
        return self._parse(answer, request.sampling.alternatives)

    async def cut(self, request_id: bytes) -> None:
        """See `ServerClient`. A stock server cannot say it."""
        raise ServerFailure(
            f"{self.url} is a stock server: it does not say what it sampled of a call that was cancelled"
        )

    async def score(self, request: ScoreRequest) -> Scores:
        """See `ServerClient`. Tokens that fill the context have their last one asked for as the next one.

        Only those, since beside a request for given tokens vLLM's first model runner leaves the most probable ones of others out.
        It takes `prompt_logprobs`, and so a server without adapters where it is on a CPU (see `probe`).
        """
        token_ids = request.token_ids.tolist()
        fits = self._context is not None and len(token_ids) < self._context
        last = {} if fits else {"logprobs": 1, "logprob_token_ids": token_ids[-1:]}
        prompt = token_ids if fits else token_ids[:-1]
        fields = {
            "model": self._name(request.model),
            "prompt": prompt,
            "max_tokens": 1,
            "repetition_penalty": 1.0,
            **_UNSHAPED,
            "prompt_logprobs": 0,
            **last,
            "return_tokens_as_token_ids": True,
            "cache_salt": self._salt,
        }
        answer = await call(self._connections.data, f"{self.url}/v1/completions", orjson.dumps(fields))

        def read() -> Float32Array:
            content = as_object(answer, self.url)
            try:
                choice = content["choices"][0]
                rows = choice["prompt_logprobs"]
                values = [rows[at][str(token_ids[at])]["logprob"] for at in range(request.start, len(prompt))]
                if last:
                    values.append(choice["logprobs"]["top_logprobs"][0][f"token_id:{token_ids[-1]}"])
            except (KeyError, IndexError, TypeError, AttributeError) as error:
                raise ServerFailure(
                    f"{self.url} answered without the log-probabilities asked for: {error!r}; a stock vLLM from 0.30 on is "
                    "expected"
                ) from error
            return as_log_probabilities(values, self.url)

        return Scores(await asyncio.to_thread(read) if len(answer) > PARSE_IN_THREAD_BYTES else read())

    async def detokenize(self, token_ids: list[int]) -> str:
        """See `ServerClient`."""
        return await detokenize(self._connections, self.url, token_ids)

    async def load(
        self, update: WeightUpdate, claim: LoadClaim, on_begun: Callable[[], None] | None = None
    ) -> HeldWeights | None:
        """See `ServerClient`. A stock server knows no owner, and tells no beginning."""
        if update.adapter is None:
            raise RequestRefused(
                f"{self.url} is used as a stock server (protocol = 'openai'), which cannot take full weights; train a LoRA "
                "adapter, or serve with `counterpoint inference` and use protocol = 'binary'"
            )
        name = f"{update.adapter}@{update.version}"
        loaded = self._adapters.setdefault(update.adapter, [])
        load = {"lora_name": name, "lora_path": str(update.directory.absolute()), "load_inplace": True}
        try:
            await call(self._connections.admin, f"{self.url}/v1/load_lora_adapter", orjson.dumps(load))
        except ServerFailure as error:
            if "No adapter found for" in str(error):  # vLLM's words for a path that it does not have
                raise WeightsNotSeen(
                    f"{error}; the server needs the job's directory under the same path, and has to be allowed to read it"
                ) from error
            raise
        if name in loaded:
            loaded.remove(name)
        loaded.append(name)
        for old in loaded[:-KEPT_ADAPTERS]:
            loaded.remove(old)
            await self._unload(old)
        return None

    async def unload(self, adapter: str | None, claim: LoadClaim) -> None:
        """See `ServerClient`. A stock server completes requests, and its engine keeps the weights until it needs the room."""
        for name in self._adapters.pop(adapter, []) if adapter is not None else ():
            await self._unload(name)

    def close(self) -> None:
        """See `ServerClient`. Its connections are those of all stock servers."""

    async def _unload(self, name: str) -> None:
        try:
            await call(self._connections.admin, f"{self.url}/v1/unload_lora_adapter", orjson.dumps({"lora_name": name}))
        except ServerFailure as error:
            # A restarted server has none to unload; one that keeps it wastes a slot, which its own eviction frees.
            logger.info("Adapter %s was not unloaded: %s", name, error)

    async def probe(self, model: str, token_ids: list[int]) -> Scores:
        """See `ServerClient`.

        One request for each token asks for the next token after those before it. `prompt_logprobs` would crash vLLM 0.32 on
        a CPU while adapter requests run (`PunicaWrapperCPU.add_lora_logits` expects one row a request).
        """
        targets = token_ids[1:]
        asked = sorted(set(targets))
        fields = {
            "model": self._name(model),
            "prompt": [token_ids[:end] for end in range(1, len(token_ids))],
            "max_tokens": 1,
            "repetition_penalty": 1.0,
            **_UNSHAPED,
            "logprobs": len(asked),
            "logprob_token_ids": asked,
            "return_tokens_as_token_ids": True,
            "cache_salt": secrets.token_hex(16),
        }
        answer = as_object(
            await call(self._connections.admin, f"{self.url}/v1/completions", orjson.dumps(fields)), self.url
        )
        try:
            rows = [choice["logprobs"]["top_logprobs"][0] for choice in answer["choices"]]
            values = [row[f"token_id:{token}"] for row, token in zip(rows, targets, strict=True)]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ServerFailure(
                f"{self.url} answered a probe without the log-probabilities asked for: {error!r}; a stock vLLM from 0.30 on is "
                "expected"
            ) from error
        return Scores(as_log_probabilities(values, self.url))

    async def parse(
        self, token_ids: list[int], tools: list[Any], template_kwargs: dict[str, Any], *, cut: bool
    ) -> ParsedText:
        """See `ServerClient`. It is vLLM's own `derender`, which runs in its API server and has no deadline there.

        The last call of a completion that was cut counts only if its arguments stand there as whole JSON.
        """
        chat = {"messages": [{"role": "user", "content": ""}], "chat_template_kwargs": template_kwargs}
        fields = {
            "generate_response": {"choices": [{"index": 0, "token_ids": token_ids, "finish_reason": "stop"}]},
            "chat_request": chat | ({"tools": tools} if tools else {}),
        }
        url = f"{self.url}/v1/chat/completions/derender"
        try:
            answer = as_object(await call(self._connections.admin, url, dumps(fields)), url)
        except ServerUnreachable:
            raise
        except (RequestRefused, ServerFailure) as error:
            raise type(error)(
                f"{error}; a stock server parses calls of tools if it is started with --enable-scale-out "
                "--enable-auto-tool-choice --tool-call-parser NAME"
            ) from error
        try:
            message = answer["choices"][0]["message"]
            found = message.get("tool_calls") or []
            parsed = ParsedText(
                content=message.get("content") or "",
                reasoning=message.get("reasoning") or "",
                calls=tuple((str(each["function"]["name"]), str(each["function"]["arguments"])) for each in found),
            )
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ServerFailure(f"{url} answered without a message: {error!r}") from error
        if cut and parsed.calls:
            text = await detokenize(self._connections, self.url, token_ids)
            if not stands_whole(text, *parsed.calls[-1]):
                return replace(parsed, calls=parsed.calls[:-1], malformed="a call was begun, but it is not complete")
        return parsed

    def _name(self, model: str) -> str:
        return self._adapters[model][-1] if self._adapters.get(model) else model

    def _parse(self, answer: bytes | memoryview, alternatives: int) -> Completion:
        content = as_object(answer, self.url)
        try:
            choice = content["choices"][0]
            experts = choice.get("routed_experts")
            return Completion(
                token_ids=_as_token_ids(choice["token_ids"]),
                log_probabilities=as_log_probabilities(choice["logprobs"]["token_logprobs"], self.url),
                finish_reason=str(choice["finish_reason"]),
                routed_experts=None if experts is None else _decode_routing(experts),
                cached_tokens=_cached_tokens(content),
                alternatives=_alternatives(choice["logprobs"]["top_logprobs"], alternatives) if alternatives else None,
            )
        except (KeyError, IndexError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise ServerFailure(
                f"{self.url} answered without token ids or log-probabilities: {error!r}; a stock vLLM from 0.30 on is expected"
            ) from error


def _as_token_ids(values: object) -> Int32Array:
    """Returns a list of integers as an array. Raises `TypeError` for anything else, `OverflowError` beyond int32."""
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise TypeError("token_ids is not a list of integers")
    return np.asarray(values, dtype=np.int32)


def _alternatives(rows: list[dict[str, float]], count: int) -> Alternatives:
    """Reads what each token's row has by `token_id:ID`: the sampled token, and the `count` most probable ones.

    Raises `ValueError` where vLLM has left the latter out: its first model runner does in a step beside requests for given
    tokens, and may have token 0 in their place, with the least number. Others have that only if all probable ones are there.
    """
    for place, row in enumerate(rows):
        lacks = min(row.values()) <= _NEVER and sum(map(math.exp, row.values())) < 1 - _ROUNDING
        if len(row) < count or lacks:
            raise ValueError(f"the most probable tokens of place {place} are missing")
    found = [sorted(row.items(), key=lambda each: -each[1])[:count] for row in rows]
    ids = [[int(name.removeprefix("token_id:")) for name, _ in row] for row in found]
    values = [[value for _, value in row] for row in found]
    return Alternatives(np.asarray(ids, dtype=np.int32), np.asarray(values, dtype=np.float32))


def _cached_tokens(content: dict[str, Any]) -> int | None:
    """Returns what a server tells that was started with vLLM's `--enable-prompt-tokens-details`."""
    match content.get("usage"):
        case {"prompt_tokens_details": {"cached_tokens": int(cached)}}:
            return cached
    return None


def _decode_routing(encoded: Any) -> RoutingArray:
    """Reads a base64 `.npy`, without pickle. Raises `ValueError` for anything but uint8 or uint16."""
    array = np.load(io.BytesIO(pybase64.b64decode(encoded, validate=True)), allow_pickle=False)
    if array.dtype not in (np.uint8, np.uint16):
        raise ValueError(f"routed experts are {array.dtype}, uint8 or uint16 is expected")
    return array  # type: ignore[no-any-return]
