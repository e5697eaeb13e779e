"""The library's model client that is our pool: answers each model call of an episode with the policy of its rollout.

The library sends every call of an episode's agents through one client. A trace's id leads to the rollout and the agent.
Requests are checked, and histories become prompts, as in the gateway: what the model wrote stays token for token, and a history
that was rewritten opens a new branch.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.dialects import ChatDialect

from counterpoint.environments.base import Model, Reply, ToolCall
from counterpoint.environments.gateway.conversation import Histories
from counterpoint.environments.gateway.errors import GatewayRefused
from counterpoint.environments.gateway.messages import template_messages
from counterpoint.environments.gateway.requests import chat_request
from counterpoint.environments.gateway.responses import assistant_message, chat_answer, choice_of, unsendable
from counterpoint.environments.gateway.session import reply_to
from counterpoint.environments.sampling import SamplingOverrides
from counterpoint.environments.verifiers_library.own_loop import on_loop
from counterpoint.transport.records import Turn

MALFORMED_CALL = "malformed_call"
"""The name of the tool call that stands for a call which cannot be read. Its argument `error` says why."""


@dataclass(slots=True)
class Seat:
    """One agent's run of one episode."""

    model: Model
    loop: asyncio.AbstractEventLoop
    """The one that `model` works on."""
    conversations: Histories
    turns: list[Turn] = field(default_factory=list)
    """What the agent wrote, in order."""
    messages: dict[int, Any] = field(default_factory=dict)
    """The library's message of a turn, by the turn's `id()`. A turn that no answer came of has none."""
    steps: list[tuple[Turn, float]] = field(default_factory=list)
    """The rewards of OpenEnv's steps, each with the turn that made the step."""
    is_closed: bool = False

    async def generate(self, prompt: Sequence[int], sampling: SamplingOverrides) -> Turn:
        """Makes one call, on `loop`. What is written after the seat was closed, nobody has read: it is not trained."""
        turn = await self.model.generate(prompt, sampling)
        self.turns.append(turn)
        if self.is_closed:
            turn.leave_untrained()
        return turn


class PolicyClient(vf.Client):
    """Serves all episodes of an environment. Used on the library's loop only."""

    def __init__(self) -> None:
        self._seats: dict[str, Seat] = {}

    def open(self, trace_id: str, model: Model, loop: asyncio.AbstractEventLoop) -> Seat:
        """Lets `model` answer the calls of a trace, until `close_seat`."""
        seat = self._seats[trace_id] = Seat(model, loop, Histories(model.chat))
        return seat

    def close_seat(self, trace_id: str) -> None:
        """Refuses the calls of a trace from now on."""
        self._seats.pop(trace_id).is_closed = True

    async def get_response(
        self,
        dialect: Any,
        body: dict[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """See `vf.Client`. `session_id` is the trace's id; `turn`, its place in the library's message graph, is not needed."""
        seat = self._seats.get(session_id or "")
        if seat is None:
            raise vf.ProviderError(f"no rollout plays trace {session_id!r} any more", status_code=404)
        if not isinstance(dialect, ChatDialect):
            raise vf.ProviderError(
                f"the policy answers chat completions only; this agent's program speaks {type(dialect).__name__}",
                status_code=400,
            )
        try:
            played, raw = await _answer(seat, body)
        except (GatewayRefused, ValueError) as error:
            raise vf.ProviderError(str(error), status_code=400) from error
        except (
            Exception
        ) as error:  # a server that is gone, a rollout that has ended: nothing that the agent's program could mend
            raise vf.ProviderError(f"{type(error).__name__}: {error}", status_code=400) from error
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        seat.messages[id(played)] = response.message
        return response


async def _answer(seat: Seat, body: dict[str, Any]) -> tuple[Turn, dict[str, Any]]:
    """Returns a turn, and the chat completion that tells of it. Raises `GatewayRefused`, or what the model raises."""
    request = chat_request(body, seat.model.sampling, seat.model.chat, agent_sampling=True)
    if request.asked.choices != 1:
        raise GatewayRefused(f"n is {request.asked.choices}; an agent's turn has one completion")
    conversations = seat.conversations.rendered_with(request.template_kwargs)
    prompt = conversations.prompt(request.messages, request.tools)
    turn = await on_loop(seat.loop, seat.generate(prompt, request.asked.overrides))
    reply = _with_malformed_call(await on_loop(seat.loop, reply_to(request, seat.model, turn)))
    choice = choice_of(turn, reply, request.asked.stop, seat.model.chat)
    [answer] = template_messages([assistant_message(choice)])
    conversations.remember(request.messages, request.tools, answer, turn)
    return turn, chat_answer([choice], seat.model.chat, log_probabilities=False)


def _with_malformed_call(reply: Reply) -> Reply:
    """A call that cannot be read becomes one whose result says so: without a call, an agent's program would end its run."""
    problem = unsendable(reply)
    calls = () if problem else reply.calls
    if not (problem := problem or reply.malformed):
        return reply
    call = ToolCall(f"malformed-{uuid.uuid4().hex[:12]}", MALFORMED_CALL, {"error": problem})
    return replace(reply, calls=(*calls, call))
