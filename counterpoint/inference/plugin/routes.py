"""Our HTTP routes inside vLLM's API server, from a model call to an update of weights.

`generate` answers in raw bytes what the JSON routes answer in text and base64. `update` is one transaction, so that a client that
dies halfway leaves no server paused. The routes reach the engine through `EngineClient`, as vLLM's own do.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from starlette.requests import ClientDisconnect
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError

from counterpoint.inference import identity, wire
from counterpoint.inference.base import Completion, GenerateRequest, Scores
from counterpoint.inference.call_frames import CALLS_PATH
from counterpoint.inference.checkpoint import NotSeen
from counterpoint.inference.loads import LoadClaim, Loads, Origin, digest_of
from counterpoint.inference.plugin.adapters import UpdateRefused
from counterpoint.inference.plugin.calls.call_connection import Answer, take_calls
from counterpoint.inference.plugin.calls.direct_route import DirectRoute
from counterpoint.inference.plugin.engine.sending import SendsTogether
from counterpoint.inference.plugin.parsing import ParserFailed, ParserProcess, ParserRefused, settings_of
from counterpoint.inference.plugin.receiving import WeightReceiver
from counterpoint.inference.plugin.scoring import MAX_ONE_BY_ONE, alternatives_of, scores_of, scoring_prompts, warm
from counterpoint.inference.plugin.socket_body import connection_of
from counterpoint.inference.plugin.update import Updater
from counterpoint.inference.sent_weights import (
    MAX_OFFER_BYTES,
    OFFER_PATH,
    SEND_PATH,
    WeightOffer,
)
from counterpoint.transport.exact_json import MAX_WRITTEN_DEPTH, JsonError, loads
from counterpoint.transport.files.own_directory import OwnDirectory
from counterpoint.transport.telemetry.start_phases import API_SERVER, OVER, enter

logger = init_logger(__name__)

MAX_JSON_BYTES = 1 << 20
"""Longest body of any request but a model call."""

MAX_PROBE_TOKENS = 256
"""Each token of a probe may be a request to the engine (`scoring`)."""


class Refusal(Exception):
    """A request that is answered with an HTTP `status` and a message."""

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
        router.add_api_route(CALLS_PATH, self.calls, methods=["GET"])
        router.add_api_route(wire.SCORE_PATH, self.score, methods=["POST"])
        router.add_api_route(wire.PROBE_PATH, self.probe, methods=["POST"])
        router.add_api_route(wire.PARSE_PATH, self.parse, methods=["POST"])
        router.add_api_route(wire.UPDATE_PATH, self.update, methods=["POST"])
        router.add_api_route(OFFER_PATH, self.offer, methods=["POST"])
        router.add_api_route(SEND_PATH, self.send, methods=["POST"])
        router.add_api_route(wire.UNLOAD_PATH, self.unload, methods=["POST"])
        router.add_api_route(wire.DRAIN_PATH, self.drain, methods=["POST"])
        router.add_api_route(wire.CUT_PATH, self.cut, methods=["POST"])
        router.add_api_route(identity.STATUS_PATH, self.status, methods=["GET"])
        app.include_router(router)
        app.add_middleware(DirectRoute, path=wire.GENERATE_PATH, endpoint=self.generate)

    async def init_state(self, engine_client: EngineClient, state: Any, args: Namespace) -> None:
        """Keeps what the routes need; called once, before the first request."""
        self.engine = engine_client
        self.models = state.openai_serving_models
        self.max_model_len = int(engine_client.model_config.max_model_len)
        self.vocabulary_size = int(engine_client.model_config.get_vocab_size())
        self.instance = os.environ.get(identity.INSTANCE_VARIABLE) or uuid.uuid4().hex
        identity_file = os.environ.get(identity.VARIABLE, "")
        self.secret = identity.read(identity_file)
        self.updater = Updater(engine_client, self.models, Loads(self.instance, self.secret, identity_file))
        self.receiver = WeightReceiver(Path(engine_client.model_config.model))
        self.returns_routing = bool(args.enable_return_routed_experts)
        self.scores_one_by_one = self.updater.serves_adapters and bool(current_platform.is_cpu())
        settings = settings_of(engine_client, args)
        self.parser = None if settings is None else ParserProcess(settings)
        self.loading: set[asyncio.Task[Response]] = set()
        self.draining = False
        enter("first passes", API_SERVER)
        client: Any = engine_client
        client.engine_core._send_input_message = SendsTogether(client.engine_core)
        await engine_client.collective_rpc("counterpoint_begin")
        await warm(engine_client, self.models, serves_adapters=self.updater.serves_adapters)
        if self.secret is not None:  # a job's own server, which its trainer's weights reach soon
            self.updater.find_provable_layers()
        enter(OVER, API_SERVER)

    async def status(self, raw_request: Request) -> Response:
        """Answers with the instance and its weights, and proves by a nonce whose server it is; 503 once the engine is dead.

        `instance` changes when the server is restarted; a restarted server holds the weights that it was started with.
        """
        try:
            await self.engine.check_health()
        except EngineDeadError:
            return _answer({"error": "the engine is dead"}, HTTPStatus.SERVICE_UNAVAILABLE)
        nonce = raw_request.headers.get(wire.NONCE_HEADER, "")
        return _answer(
            {
                "instance": self.instance,
                "proof": None if self.secret is None else identity.proof(self.secret, self.instance, nonce),
                "draining": self.draining,
                "reasons": self.parser is not None and self.parser.reads_reasoning,
                "weights": self.updater.loads.described(None),
                "adapters": self.updater.adapters.described(),
            }
        )

    async def generate(self, raw_request: Request) -> Response:
        """Answers a model call in `wire`'s encoding.

        400 for a malformed one, 404 for an unknown model, 413 for a body that is too long.
        """
        try:
            body = await _read(raw_request, wire.max_request_bytes(self.max_model_len))
        except Refusal as refusal:
            return _answer({"error": str(refusal)}, refusal.status)
        status, answer = await self._answered(body, raw_request)
        media_type = "application/octet-stream" if status == HTTPStatus.OK else "application/json"
        return Response(answer, status_code=status, media_type=media_type)

    async def calls(self, raw_request: Request) -> Response:
        """Makes the connection one that carries many model calls with small answers (`call_frames`).

        501 if answers have routing, and are not small.
        """
        if self.returns_routing:
            return _answer({"error": "answers have routing: ask for each by a POST"}, HTTPStatus.NOT_IMPLEMENTED)
        return take_calls(raw_request, self._answered, wire.max_request_bytes(self.max_model_len))

    async def _answered(self, body: bytes, raw_request: Request | None = None) -> Answer:
        """Returns what answers a model call. `raw_request` is one of its own, whose client may hang up."""
        try:
            return HTTPStatus.OK, await self._complete(_decode(body), raw_request)
        except Refusal as refusal:
            return refusal.status, orjson.dumps({"error": str(refusal)})

    async def _complete(self, request: GenerateRequest, raw_request: Request | None) -> bytes:
        sampling = SamplingParams(
            **request.sampling.named,
            structured_outputs=StructuredOutputsParams(json=schema)
            if (schema := request.sampling.json_schema)
            else None,
            seed=request.sampling.seed or None,
            logprobs=(alternatives := min(request.sampling.alternatives, self.vocabulary_size)),
            flat_logprobs=True,
            # Stop strings are searched in the text, which is not needed otherwise.
            detokenize=bool(request.sampling.stop),
            # A stop string may be a special token.
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            routed_experts_prompt_start=request.routed_experts_start,
            output_kind=RequestOutputKind.FINAL_ONLY,
            # vLLM copies the parameters deeply otherwise; these are no one else's.
            skip_clone=True,
        )
        prompts, name = [(request.prompt_ids.tolist(), sampling)], request.request_id.hex()
        ran = await self._run(request.model, prompts, raw_request, name=name)
        if ran is None:
            return b""  # The client has disconnected, which ended the request; nobody reads this.
        outputs, origin = ran
        (choice,) = outputs[0].outputs
        if choice.finish_reason == "error":
            raise Refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "the engine failed on this request")
        if choice.finish_reason == "abort":  # its client has it cut, and asks how long it is
            token_ids = np.asarray(choice.token_ids, dtype=np.int32)
            none = np.zeros(len(token_ids), np.float32)
            cut = Completion(token_ids, none, "abort", None, origin=origin, echo=request.echo)
            return wire.encode_completion(cut)
        try:
            most_probable = alternatives_of(choice.logprobs, alternatives) if alternatives else None
        except LookupError as error:
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, f"the engine's answer is incomplete: {error}") from error
        completion = Completion(
            token_ids=np.asarray(choice.token_ids, dtype=np.int32),
            # The sampled token comes first of its position, before the most probable ones.
            log_probabilities=np.asarray(choice.logprobs.logprobs, dtype=np.float32)[choice.logprobs.start_indices],
            finish_reason=str(choice.finish_reason),
            routed_experts=choice.routed_experts,
            cached_tokens=outputs[0].num_cached_tokens,
            origin=origin,
            echo=request.echo,
            alternatives=most_probable,
        )
        return wire.encode_completion(completion)

    async def score(self, raw_request: Request) -> Response:
        """Answers a request for the log-probabilities of given tokens (`scoring.py`), in `wire`'s encoding."""
        try:
            body = await _read(raw_request, wire.max_request_bytes(self.max_model_len))
            try:
                request = wire.decode_score_request(body)
            except ValueError as error:
                raise Refusal(HTTPStatus.BAD_REQUEST, str(error)) from error
            token_ids, start = request.token_ids.tolist(), request.start
            if self.scores_one_by_one and len(token_ids) - start > MAX_ONE_BY_ONE:
                raise Refusal(
                    HTTPStatus.BAD_REQUEST,
                    f"{len(token_ids) - start} tokens to score; at most {MAX_ONE_BY_ONE} by a server of adapters on a CPU, which "
                    "takes a request for each",
                )
            self._check_ids(token_ids)
            prompts = scoring_prompts(token_ids, start, one_by_one=self.scores_one_by_one)
            ran = await self._run(request.model, prompts, raw_request)
        except Refusal as refusal:
            return _answer({"error": str(refusal)}, refusal.status)
        if ran is None:
            return Response(status_code=HTTPStatus.NO_CONTENT)
        outputs, origin = ran
        if any(output.outputs[0].finish_reason == "error" for output in outputs):
            return _answer({"error": "the engine failed on this request"}, HTTPStatus.INTERNAL_SERVER_ERROR)
        scores = Scores(scores_of(outputs, token_ids, start), origin, request.echo)
        return Response(wire.encode_scores(scores), media_type="application/octet-stream")

    async def probe(self, raw_request: Request) -> Response:
        """Answers `{"model", "token_ids"}` with `{"log_probabilities", "weights"}`, computed anew.

        They are those of each token after the first, at temperature 1.
        """
        try:
            fields = await _read_json(raw_request)
            match fields:
                case {"model": str(model), "token_ids": [_, _, *_] as token_ids} if all(
                    type(token) is int for token in token_ids
                ):
                    pass
                case _:
                    raise Refusal(HTTPStatus.BAD_REQUEST, "a probe is {model: name, token_ids: [two or more integers]}")
            if len(token_ids) > MAX_PROBE_TOKENS:
                raise Refusal(HTTPStatus.BAD_REQUEST, f"a probe has at most {MAX_PROBE_TOKENS} tokens")
            prompts = scoring_prompts(token_ids, 1, one_by_one=self.updater.serves_adapters)
            ran = await self._run(model, prompts, raw_request, salt=uuid.uuid4().hex)
        except Refusal as refusal:
            return _answer({"error": str(refusal)}, refusal.status)
        if ran is None:
            return Response(status_code=HTTPStatus.NO_CONTENT)
        outputs, origin = ran
        return _answer({"log_probabilities": scores_of(outputs, token_ids, 1).tolist(), "weights": origin.encode()})

    async def parse(self, raw_request: Request) -> Response:
        """Answers `{"token_ids", "tools", "template_kwargs", "cut"}` with what a completion says, by the parsers named at start.

        `{"content", "reasoning", "calls": [{"name", "arguments": JSON}], "malformed"}`. `cut`: the completion ended before the
        model ended it; only calls that are whole are answered. 400 if the server has no parser.
        """
        try:
            fields = await _read_json(raw_request, MAX_JSON_BYTES + 8 * self.max_model_len)
            match fields:
                case {"token_ids": list(token_ids), "tools": list(tools), "template_kwargs": dict(), "cut": bool()} if (
                    all(type(token) is int and 0 <= token < self.vocabulary_size for token in token_ids)
                    and len(token_ids) <= self.max_model_len
                ):
                    pass
                case _:
                    raise Refusal(
                        HTTPStatus.BAD_REQUEST,
                        "a parse is {token_ids: ids of at most one context, tools: [definitions], template_kwargs: {...}, "
                        "cut: true or false}",
                    )
            if self.parser is None:
                raise Refusal(
                    HTTPStatus.BAD_REQUEST,
                    "this server parses no calls of tools: set tool_parser (and reasoning_parser) in [inference]",
                )
            if tools and not self.parser.reads_calls:
                raise Refusal(
                    HTTPStatus.BAD_REQUEST,
                    "this server parses reasoning, but no calls of tools: set tool_parser in [inference], too",
                )
            return _answer(await self.parser.parse(fields))
        except Refusal as refusal:
            return _answer({"error": str(refusal)}, refusal.status)
        except ParserRefused as refused:
            return _answer({"error": str(refused)}, HTTPStatus.BAD_REQUEST)
        except ParserFailed as failed:
            return _answer({"error": str(failed)}, HTTPStatus.INTERNAL_SERVER_ERROR)

    async def update(self, raw_request: Request) -> Response:
        """Loads published weights: `{"version", "directory", "adapter", "claim"}`.

        Answers `{"version", "held": {"dtype", "layers", "load"}}`, the digest of the weights with which the engine computes
        from then on, and the number by which answers name them. 422 if they are refused and nothing has changed; 424 if this
        server does not see the directory, or may not read it. The answer may begin before they are loaded: requests that come
        once it has begun are computed with them.
        """
        try:
            fields = await _read_json(raw_request)
            match fields:
                case {
                    "version": int(version),
                    "directory": str(directory),
                    "adapter": str() | None as adapter,
                    "claim": dict(given),
                } if type(version) is int:
                    claim = _claim(given)
                case _:
                    raise Refusal(
                        HTTPStatus.BAD_REQUEST,
                        "an update is {version: integer, directory: path, adapter: name or null, claim: {...}}",
                    )
        except Refusal as refusal:
            return _answer({"error": str(refusal)}, refusal.status)
        begun = asyncio.get_running_loop().create_future()
        loading = asyncio.create_task(
            self._load(version, Path(directory), adapter, claim, partial(begun.set_result, None))
        )
        self.loading.add(loading)
        loading.add_done_callback(self.loading.discard)
        await asyncio.wait({begun, loading}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            return loading.result()

        async def answer() -> AsyncIterator[bytes]:
            yield bytes((await asyncio.shield(loading)).body)  # a client that hangs up ends no load

        return StreamingResponse(answer(), media_type="application/json")

    async def offer(self, raw_request: Request) -> Response:
        """Answers an offer of weights (`sent_weights.py`) with `{"holds": names of files that need not come}`.

        422 if they could never be taken, 503 if not now.
        """
        try:
            held = await self.receiver.consider(WeightOffer.decode(await _read(raw_request, MAX_OFFER_BYTES)))
        except Refusal as refusal:
            return _answer({"error": str(refusal)}, refusal.status)
        except (OSError, ValueError) as error:
            return _not_taken(error)
        return _answer({"holds": sorted(held)})

    async def send(self, raw_request: Request) -> Response:
        """Loads weights that come in the body, and answers as `update` does."""
        try:
            offer, received = await self.receiver.receive(raw_request.stream(), connection_of(raw_request.scope))
        except ClientDisconnect:
            logger.warning("A client hung up before its weights had come whole; nothing has changed")
            return Response(status_code=HTTPStatus.NO_CONTENT)
        except (OSError, ValueError) as error:
            return _not_taken(error)
        return await self._load_received(offer, received)

    async def _load_received(self, offer: WeightOffer, received: OwnDirectory) -> Response:
        try:
            return await self._load(offer.version, received.path, offer.adapter, offer.claim)
        finally:
            await asyncio.to_thread(received.remove)

    async def _load(
        self,
        version: int,
        directory: Path,
        adapter: str | None,
        claim: LoadClaim,
        on_begun: Callable[[], None] = lambda: None,
    ) -> Response:
        try:
            held = await self.updater.update(version, directory, adapter, claim, on_begun)
        except NotSeen as error:
            logger.error("Weights of version %s are not seen: %s", version, error)
            return _answer({"error": str(error)}, HTTPStatus.FAILED_DEPENDENCY)
        except UpdateRefused as refused:
            logger.error("Refused weights of version %s: %s", version, refused)
            return _answer({"error": str(refused)}, HTTPStatus.UNPROCESSABLE_ENTITY)
        self.updater.loads.read_back(adapter, held.load, digest_of(held.dtype, held.layers))
        described = {"dtype": held.dtype, "layers": held.layers, "load": held.load}
        return _answer({"version": version, "held": described})

    async def unload(self, raw_request: Request) -> Response:
        """Ends the requests of an adapter and removes it: `{"adapter", "claim"}` to `{"unloaded"}`. null: the full weights.

        Those stay, and anyone may load others. An adapter that is not loaded is no error; 422 for one of another owner.
        """
        try:
            fields = await _read_json(raw_request)
            match fields:
                case {"adapter": str() | None as adapter, "claim": dict(given)}:
                    claim = _claim(given)
                case _:
                    raise Refusal(HTTPStatus.BAD_REQUEST, "an unloading is {adapter: name or null, claim: {...}}")
            return _answer({"unloaded": await self.updater.unload(adapter, claim)})
        except UpdateRefused as refused:
            return _answer({"error": str(refused)}, HTTPStatus.UNPROCESSABLE_ENTITY)
        except Refusal as refusal:
            return _answer({"error": str(refusal)}, refusal.status)
        except TimeoutError:
            message = (
                f"the requests of adapter {adapter!r} did not end; it takes no new ones, and its weights stay in memory"
            )
            return _answer({"error": message}, HTTPStatus.INTERNAL_SERVER_ERROR)

    async def drain(self, raw_request: Request) -> Response:
        """Sets whether `status` asks clients to send no further requests: `{"draining": true}` or `false`.

        Requests in flight go on, and the server itself refuses nothing.
        """
        try:
            fields = await _read_json(raw_request)
            match fields:
                case {"draining": bool(draining)}:
                    self.draining = draining
                case _:
                    raise Refusal(HTTPStatus.BAD_REQUEST, "a drain is {draining: true or false}")
        except Refusal as refusal:
            return _answer({"error": str(refusal)}, refusal.status)
        logger.info("This server is %s", "to be drained" if draining else "in use again")
        return _answer({"draining": draining})

    async def cut(self, raw_request: Request) -> Response:
        """Ends a model call, which is answered with what was sampled so far: `{"request_id": hexadecimal}`."""
        try:
            match await _read_json(raw_request):
                case {"request_id": str(request_id)}:
                    await self.engine.abort(request_id)
                case _:
                    raise Refusal(HTTPStatus.BAD_REQUEST, "a cut is {request_id: that of a model call, hexadecimal}")
        except Refusal as refusal:
            return _answer({"error": str(refusal)}, refusal.status)
        return _answer({"cut": True})

    async def _run(
        self,
        model: str,
        prompts: list[tuple[list[int], SamplingParams]],
        raw_request: Request | None,
        salt: str | None = None,
        name: str | None = None,
    ) -> tuple[list[Any], Origin] | None:
        """Returns the engine's final output of each prompt and the weights that computed them.

        None if the client of `raw_request` disconnected, which aborts them, as it does to cancel this.

        `salt` replaces the cache salt by which prompts share prefixes. `name` is that of the engine's requests; None: a new one.
        """
        for token_ids, _ in prompts:
            self._check_prompt(token_ids)

        async def generate(token_ids: list[int], sampling: SamplingParams, adapter: Any, shared_salt: str) -> Any:
            final = None
            prompt = tokens_input(token_ids, cache_salt=salt or shared_salt)
            async for output in self.engine.generate(prompt, sampling, name or uuid.uuid4().hex, lora_request=adapter):
                final = output
            return final

        async def every(calls: Iterator[Coroutine[Any, Any, Any]]) -> list[Any]:
            first, *others = calls
            if not others:  # one needs no task of its own
                return [await first]
            return list(await asyncio.gather(first, *others))

        async def run(model: str, _: Request | None) -> tuple[list[Any], Origin]:
            loads, adapters = self.updater.loads, self.updater.adapters
            if self.models.is_base_model(model):
                first, shared = loads.now(None), self.updater.cache_salt
                outputs = await every(generate(*prompt, None, shared) for prompt in prompts)
                loads.witness(_labels(outputs), first)
                return outputs, loads.origin(None, first)
            if model in self.models.lora_requests:
                async with adapters.using(model) as used:
                    if used is not None:
                        adapter, first = used
                        shared = f"{model}@{first.number}"
                        outputs = await every(generate(*prompt, adapter, shared) for prompt in prompts)
                        return outputs, adapters.origin(model, first)
            raise Refusal(HTTPStatus.NOT_FOUND, f"model {model!r} is neither the base model nor a loaded adapter")

        try:
            running = run if raw_request is None else with_cancellation(run)
            ran: tuple[list[Any], Origin] | None = await running(model, raw_request)
        except VLLMClientError as error:
            raise Refusal(HTTPStatus.BAD_REQUEST, str(error)) from error
        except EngineDeadError as error:
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "the engine is dead") from error
        return ran

    def _check_prompt(self, token_ids: list[int]) -> None:
        if len(token_ids) >= self.max_model_len:
            raise Refusal(
                HTTPStatus.BAD_REQUEST,
                f"a prompt of {len(token_ids)} tokens leaves no room in {self.max_model_len} tokens of context; "
                "shorten it, or raise max_model_len",
            )
        self._check_ids(token_ids)

    def _check_ids(self, token_ids: list[int]) -> None:
        if min(token_ids) < 0 or max(token_ids) >= self.vocabulary_size:
            raise Refusal(HTTPStatus.BAD_REQUEST, f"token ids must be from 0 to {self.vocabulary_size - 1}")


def _labels(outputs: Sequence[Any]) -> set[str]:
    """Returns how the engine calls the weights that made the tokens of its outputs, where it says so."""
    spans = [span for output in outputs for choice in output.outputs for span in choice.weight_versions or ()]
    return {span.version for span in spans}


def _answer(content: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")


def _not_taken(error: OSError | ValueError) -> Response:
    logger.error("Refused weights that were sent: %s", error)
    never = isinstance(error, ValueError)
    return _answer({"error": str(error)}, HTTPStatus.UNPROCESSABLE_ENTITY if never else HTTPStatus.SERVICE_UNAVAILABLE)


def _claim(fields: dict[str, Any]) -> LoadClaim:
    try:
        return LoadClaim.decode(fields)
    except ValueError as error:
        raise Refusal(HTTPStatus.BAD_REQUEST, str(error)) from error


def _decode(body: bytes) -> GenerateRequest:
    try:
        return wire.decode_request(body)
    except ValueError as error:
        raise Refusal(HTTPStatus.BAD_REQUEST, str(error)) from error


async def _read_json(raw_request: Request, limit: int = MAX_JSON_BYTES) -> Any:
    try:
        return loads(await _read(raw_request, limit), MAX_WRITTEN_DEPTH)
    except JsonError as error:
        raise Refusal(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}") from error


async def _read(raw_request: Request, limit: int) -> bytes:
    """Returns the body; holds no more than `limit` bytes at any time."""
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
