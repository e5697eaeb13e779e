"""The answers of servers: checked, since one that the model cannot give is none, and as turns of a rollout."""

from __future__ import annotations

import asyncio

from inference.answer_bounds import AnswerBounds
from inference.base import Completion, GenerateRequest, ScoreRequest, Scores
from inference.clients.client import ServerClient
from transport.records import Turn

CHECK_IN_THREAD_BYTES = 8 << 20
"""A longer routing is checked off the loop: a pass over a megabyte takes some 40 us."""


async def generate(client: ServerClient, request: GenerateRequest, bounds: AnswerBounds) -> Completion:
    """Makes one model call. Raises as `ServerClient` and `Completion.check`."""
    completion = await client.generate(request)
    experts = completion.routed_experts
    if experts is not None and experts.nbytes > CHECK_IN_THREAD_BYTES:
        await asyncio.to_thread(completion.check, request, bounds)
    else:
        completion.check(request, bounds)
    return completion


async def score(client: ServerClient, request: ScoreRequest) -> Scores:
    """Returns the log-probabilities of given tokens. Raises as `ServerClient` and `ScoreRequest.check`."""
    scores = await client.score(request)
    request.check(scores)
    return scores


def as_turn(request: GenerateRequest, completion: Completion, version: int, url: str) -> Turn:
    """Returns the turn that a checked answer is, of the server at `url` with the weights of `version`."""
    cached = completion.cached_tokens
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
        # Within its limits, whatever a server says: a number for people fails no request.
        cached_tokens=cached if cached is None else max(0, min(cached, len(request.prompt_ids))),
    )
