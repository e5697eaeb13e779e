"""One call to a server: checks the answer against the model, and turns it into a turn of a rollout.

A parse of a completion takes no place of a model call. Any server of the pool parses as any other does, whatever weights it
holds. The one that generated the completion is asked first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from counterpoint.inference.base import (
    Completion,
    GenerateRequest,
    InferenceError,
    ParsedText,
    SamplingParameters,
    ScoreRequest,
    Scores,
    ServerFailure,
)
from counterpoint.inference.clients.client import ServerClient
from counterpoint.inference.model_facts import AnswerBounds
from counterpoint.transport.records import Turn

logger = logging.getLogger(__name__)

Asked = TypeVar("Asked", contravariant=True)
Content = TypeVar("Content", covariant=True)


class _Call(Protocol[Asked, Content]):
    """One call to a server. As a function with arguments, since a closure would be five objects for each turn."""

    def __call__(self, client: ServerClient, request: Asked, bounds: AnswerBounds, /) -> Awaitable[Content]:
        """Returns an answer that fits the request and the model. Raises as `ServerClient`."""


COMPARED_ALTERNATIVES = 5
"""The number of most probable tokens that `ignores_temperature` compares."""

FLAT = 1e-3
"""The least difference of theirs, in nats, that proves anything."""

CUT_SECONDS = 2.0
"""Seconds that a cancelled call waits for the server's tokens so far."""

CHECK_IN_THREAD_BYTES = 8 << 20
"""A longer routing is checked off the loop: a pass over a megabyte takes some 40 us."""


async def generate(client: ServerClient, request: GenerateRequest, bounds: AnswerBounds) -> Completion:
    """Makes one model call. Raises as `ServerClient` and `Completion.check`."""
    completion = await (client.generate(request) if request.on_cut is None else _cut_when_cancelled(client, request))
    experts = completion.routed_experts
    if experts is not None and experts.nbytes > CHECK_IN_THREAD_BYTES:
        await asyncio.to_thread(completion.check, request, bounds)
    else:
        completion.check(request, bounds)
    return completion


async def _cut_when_cancelled(client: ServerClient, request: GenerateRequest) -> Completion:
    """Makes one model call. A cancelled one is cut short at the server, which then answers with its tokens so far."""
    call = asyncio.ensure_future(client.generate(request))
    call.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody may be there to take it
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        try:
            async with asyncio.timeout(CUT_SECONDS):
                await client.cut(request.request_id)
                tokens = len((await call).token_ids)
            if request.on_cut is not None:
                request.on_cut(min(tokens, request.sampling.max_tokens))
        except (InferenceError, TimeoutError) as error:
            logger.debug("%s does not say what it sampled of a call that was cancelled: %s", client.url, error)
        raise
    finally:
        call.cancel()


async def score(client: ServerClient, request: ScoreRequest, bounds: AnswerBounds) -> Scores:
    """Returns the log-probabilities of given tokens. Raises as `ServerClient` and `ScoreRequest.check`."""
    scores = await client.score(request)
    request.check(scores)
    return scores


async def detokenize(client: ServerClient, token_ids: list[int], bounds: AnswerBounds) -> str:
    """Returns the text of token ids. Raises as `ServerClient`."""
    return await client.detokenize(token_ids)


async def ignores_temperature(client: ServerClient, model: str) -> bool:
    """Whether log-probabilities are those of the model's distribution at any temperature. Raises as `ServerClient`.

    Asks twice for those after one token: at a quarter of the temperature their differences are four times as large.
    """
    differences = []
    for temperature in (1.0, 0.25):
        sampling = SamplingParameters(max_tokens=1, temperature=temperature, alternatives=COMPARED_ALTERNATIVES)
        request = GenerateRequest(model, np.zeros(1, dtype=np.int32), sampling, 0)
        completion = await client.generate(request)
        completion.check(request)
        assert completion.alternatives is not None  # `check` compares their number
        [values] = completion.alternatives.log_probabilities_TK
        differences.append(float(values[0] - values[-1]))
    return differences[0] > FLAT and differences[1] < 2 * differences[0]


def as_turn(request: GenerateRequest, completion: Completion, version: int, url: str) -> Turn:
    """Returns a checked answer as a turn, from the server at `url` with the weights of `version`."""
    cached, origin = completion.cached_tokens, completion.origin
    return Turn(
        prompt_ids=request.prompt_ids,
        completion_ids=completion.token_ids,
        log_probabilities=completion.log_probabilities,
        policy_version=version,
        finish_reason=completion.finish_reason,
        routed_experts=completion.routed_experts,
        routed_experts_start=request.routed_experts_start,
        server=url,
        temperature=request.sampling.temperature,
        # Within its limits, whatever the server answers: a number for people fails no request.
        cached_tokens=cached if cached is None else max(0, min(cached, len(request.prompt_ids))),
        load="" if origin is None else f"{origin.instance}:{origin.first}-{origin.last}",
        seed=request.sampling.seed,
        alternatives=completion.alternatives,
    )


PARSE_SECONDS = 240.0
"""Deadline of one parse, retries included. A server's first one may wait for its parsers to load."""

ATTEMPTS = 4
PAUSE_SECONDS = 0.5


async def parse(
    clients: Sequence[ServerClient],
    token_ids: list[int],
    tools: Sequence[Any],
    template_kwargs: dict[str, Any],
    *,
    cut: bool,
    first: str | None,
) -> ParsedText:
    """Returns a completion's parsed text. `clients` are those of the servers in service, and `first` is the URL asked first.

    `cut`: the model did not end it, and only whole calls count.

    Raises `RequestRefused` if the server has no parser or refuses the tools, `InferenceError` if none answers.
    """
    if not clients:
        raise InferenceError("no inference server is in service to parse a completion")
    order = sorted(clients, key=lambda client: client.url != first)
    last: ServerFailure | None = None
    try:
        async with asyncio.timeout(PARSE_SECONDS):
            for attempt in range(ATTEMPTS):
                if attempt:
                    await asyncio.sleep(PAUSE_SECONDS)
                try:
                    return await order[attempt % len(order)].parse(token_ids, list(tools), template_kwargs, cut=cut)
                except ServerFailure as error:
                    last = error
    except TimeoutError:
        raise InferenceError(f"a completion was not parsed within {PARSE_SECONDS:g} s: {last or 'no answer'}") from None
    raise InferenceError(f"a completion was not parsed after {ATTEMPTS} attempts; the last: {last}") from last
