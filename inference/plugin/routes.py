"""Our HTTP routes inside vLLM's API server: generate, probe, update, status.

`generate` answers in raw bytes what the JSON routes answer in text and base64. `update` is one transaction, so that a client that
dies halfway leaves no server paused. The routes reach the engine through `EngineClient`, as vLLM's own do.
"""

from __future__ import annotations

import uuid
from argparse import Namespace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.logger import init_logger
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from inference import wire
from inference.base import Completion, GenerateRequest
from inference.plugin.update import Updater, UpdateRefused

logger = init_logger(__name__)

MAX_JSON_BYTES = 1 << 20
"""Of a probe or an update."""


class Refusal(Exception):
    """A request that is answered with `status` and a sentence."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class CounterpointRoutes:
    """vLLM's `EndpointPlugin`. One instance an API server."""

    name = "counterpoint"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Adds the routes; called once, before the engine is known."""
        router = APIRouter()
        router.add_api_route(wire.GENERATE_PATH, self.generate, methods=["POST"])
        router.add_api_route(wire.PROBE_PATH, self.probe, methods=["POST"])
        router.add_api_route(wire.UPDATE_PATH, self.update, methods=["POST"])
        router.add_api_route(wire.STATUS_PATH, self.status, methods=["GET"])
        app.include_router(router)

    async def init_state(self, engine_client: EngineClient, state: Any, args: Namespace) -> None:
        """Keeps what the routes need; called once, before the first request."""
        self.engine = engine_client
        self.models = state.openai_serving_models
        self.max_model_len = int(engine_client.model_config.max_model_len)
        self.vocabulary_size = int(engine_client.model_config.get_vocab_size())
        self.updater = Updater(engine_client, self.models)
        self.instance = uuid.uuid4().hex

    async def status(self) -> Response:
        """Who this is and what it holds. 503 once the engine is dead. `instance` changes when the server is restarted, and a
        restarted server holds the weights it was started with."""
        try:
            await self.engine.check_health()
        except EngineDeadError:
            return _answer({"error": "the engine is dead"}, HTTPStatus.SERVICE_UNAVAILABLE)
        return _answer(
            {"instance": self.instance, "version": self.updater.version, "adapters": self.updater.adapter_versions}
        )

    async def generate(self, raw_request: Request) -> Response:
        """A model call in `wire`'s encoding. 400 for a malformed one, 404 for an unknown model, 413 for one that is too long."""
        try:
            request = _decode(await _read(raw_request, wire.max_request_bytes(self.max_model_len)))
            return await self._complete(request, raw_request)
        except Refusal as refusal:
            return _answer({"error": str(refusal)}, refusal.status)

    async def _complete(self, request: GenerateRequest, raw_request: Request) -> Response:
        sampling = SamplingParams(
            temperature=request.sampling.temperature,
            max_tokens=request.sampling.max_tokens,
            stop_token_ids=list(request.sampling.stop_token_ids),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            routed_experts_prompt_start=request.routed_experts_start,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._run(request.model, request.prompt_ids, sampling, raw_request)
        if output is None:
            # The client has gone, and with it the request; nobody reads this.
            return Response(status_code=HTTPStatus.NO_CONTENT)
        (choice,) = output.outputs
        if choice.finish_reason == "error":
            raise Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "the engine failed on this request")
        completion = Completion(
            token_ids=np.asarray(choice.token_ids, dtype=np.int32),
            # The sampled token comes first of its position; with logprobs=0 it is the only one.
            log_probabilities=np.asarray(choice.logprobs.logprobs, dtype=np.float32)[choice.logprobs.start_indices],
            finish_reason=str(choice.finish_reason),
            routed_experts=choice.routed_experts,
        )
        return Response(wire.encode_completion(completion), media_type="application/octet-stream")

    async def probe(self, raw_request: Request) -> Response:
        """`{"model", "token_ids"}` to `{"log_probabilities"}`: of each token after the first, at temperature 1, computed anew."""
        try:
            fields = await _read_json(raw_request)
            match fields:
                case {"model": str(model), "token_ids": [_, _, *_] as token_ids} if all(
                    type(token) is int for token in token_ids
                ):
                    pass
                case _:
                    raise Refusal(HTTPStatus.BAD_REQUEST, "a probe is {model: name, token_ids: [two or more integers]}")
            sampling = SamplingParams(
                max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
            )
            prompt_ids = np.asarray(token_ids, dtype=np.int64)
            output = await self._run(model, prompt_ids, sampling, raw_request)
        except Refusal as refusal:
            return _answer({"error": str(refusal)}, refusal.status)
        if output is None:
            return Response(status_code=HTTPStatus.NO_CONTENT)
        rows = zip(token_ids[1:], output.prompt_logprobs[1:], strict=True)
        return _answer({"log_probabilities": [row[token].logprob for token, row in rows]})

    async def update(self, raw_request: Request) -> Response:
        """`{"version", "directory", "adapter"}`: loads published weights. 422 if they are refused and nothing has changed."""
        try:
            fields = await _read_json(raw_request)
            match fields:
                case {"version": int(version), "directory": str(directory), "adapter": str() | None as adapter}:
                    pass
                case _:
                    raise Refusal(
                        HTTPStatus.BAD_REQUEST,
                        "an update is {version: integer, directory: path, adapter: name or null}",
                    )
            await self.updater.update(version, Path(directory), adapter)
        except Refusal as refusal:
            return _answer({"error": str(refusal)}, refusal.status)
        except UpdateRefused as refused:
            logger.error("Refused weights of version %s: %s", version, refused)
            return _answer({"error": str(refused)}, HTTPStatus.UNPROCESSABLE_ENTITY)
        return _answer({"version": version})

    async def _run(self, model: str, prompt_ids: Any, sampling: SamplingParams, raw_request: Request) -> Any:
        """The engine's final output, or None if the client hung up, which aborts the request."""
        adapter = self.models.lora_requests.get(model)
        if adapter is None and not self.models.is_base_model(model):
            raise Refusal(HTTPStatus.NOT_FOUND, f"model {model!r} is neither the base model nor a loaded adapter")
        if len(prompt_ids) >= self.max_model_len:
            raise Refusal(
                HTTPStatus.BAD_REQUEST,
                f"a prompt of {len(prompt_ids)} tokens leaves no room in {self.max_model_len} tokens of context",
            )
        if int(prompt_ids.min()) < 0 or int(prompt_ids.max()) >= self.vocabulary_size:
            raise Refusal(HTTPStatus.BAD_REQUEST, f"token ids must be from 0 to {self.vocabulary_size - 1}")

        @with_cancellation
        async def run(prompt: Any, raw_request: Request) -> Any:
            final = None
            async for output in self.engine.generate(prompt, sampling, uuid.uuid4().hex, lora_request=adapter):
                final = output
            return final

        try:
            salt = self.updater.cache_salt(model if adapter is not None else None)
            return await run(tokens_input(prompt_ids.tolist(), cache_salt=salt), raw_request)
        except VLLMClientError as error:
            raise Refusal(HTTPStatus.BAD_REQUEST, str(error)) from error
        except EngineDeadError as error:
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "the engine is dead") from error


def _answer(content: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")


def _decode(body: bytes) -> GenerateRequest:
    try:
        return wire.decode_request(body)
    except ValueError as error:
        raise Refusal(HTTPStatus.BAD_REQUEST, str(error)) from error


async def _read_json(raw_request: Request) -> Any:
    try:
        return orjson.loads(await _read(raw_request, MAX_JSON_BYTES))
    except orjson.JSONDecodeError as error:
        raise Refusal(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}") from error


async def _read(raw_request: Request, limit: int) -> bytes:
    """The body, of which no more than `limit` bytes are ever held."""
    announced = raw_request.headers.get("content-length", "0")
    too_long = Refusal(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is longer than {limit} bytes, the most this route takes"
    )
    if announced.isdigit() and int(announced) > limit:
        raise too_long
    body = bytearray()
    async for chunk in raw_request.stream():
        if len(body) + len(chunk) > limit:
            raise too_long
        body += chunk
    return bytes(body)
