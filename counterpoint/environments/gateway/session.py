"""One rollout's share of the gateway: its URL and key, its histories, its limits, and the requests in progress."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ParamSpec, TypeVar

from counterpoint.environments.base import Model, Reply
from counterpoint.environments.chat import LONG_TEXT
from counterpoint.environments.gateway import anthropic_request, responses_request
from counterpoint.environments.gateway.anthropic_answer import anthropic_answer
from counterpoint.environments.gateway.constraints import check_kept, read_demanded
from counterpoint.environments.gateway.conversation import Histories
from counterpoint.environments.gateway.errors import GatewayRefused
from counterpoint.environments.gateway.fields import check_names, named_as, refuse
from counterpoint.environments.gateway.json_body import parse_body
from counterpoint.environments.gateway.messages import template_messages
from counterpoint.environments.gateway.requests import (
    Asked,
    ChatRequest,
    CompletionRequest,
    chat_request,
    completion_request,
)
from counterpoint.environments.gateway.responses import (
    Choice,
    assistant_message,
    chat_answer,
    choice_of,
    completion_answer,
    unsendable,
)
from counterpoint.environments.gateway.responses_answer import responses_answer
from counterpoint.transport.exact_json import dumps
from counterpoint.transport.printable import clipped
from counterpoint.transport.records import Turn
from counterpoint.transport.telemetry.agent_time import AgentTimes

Parameters = ParamSpec("Parameters")
Made = TypeVar("Made")

_logger = logging.getLogger(__name__)
_UNTRAINED = (
    "an agent constrains its answers (response_format, or a tool_choice that demands a call): they are served, and their "
    "tokens are not trained (docs/gateway.md)"
)
_KEPT_ERRORS = 8
_LONGEST_ERROR = 500
_END_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What one rollout may ask for."""

    body_bytes: int = 4 * 2**20
    """The size of one request."""
    requests_at_once: int = 64
    requests_waiting: int = 1024
    """Further ones wait until one of those has been answered; beyond so many they are refused."""
    turns: int = 4096
    """The turns of the session, in all."""


class RewardRefused(ValueError):
    """An agent sent a reward that cannot be taken. Its rollout fails: without it, it would be trained on other rewards."""


class Session:
    """The endpoint of one rollout. `Gateway.session` makes it."""

    def __init__(
        self,
        model: Model,
        base_url: str,
        api_key: str,
        limits: Limits,
        *,
        agent_sampling: bool,
        turn_rewards: bool = False,
    ) -> None:
        self.base_url = base_url
        """The `OPENAI_BASE_URL` of an agent."""
        self.anthropic_url = base_url.removesuffix("/v1")
        """The `ANTHROPIC_BASE_URL` of an agent."""
        self.api_key = api_key
        """The key of an agent for both, which is a secret."""
        self.limits = limits
        self.turns: list[Turn] = []
        """Those that were answered, in order."""
        self.last_reply: Reply | None = None
        """The reply of the newest turn."""
        self.errors: deque[str] = deque(maxlen=_KEPT_ERRORS)
        """Why the newest refused or failed requests had no answer."""
        self.times = AgentTimes()
        """When requests were in progress."""
        self.has_ended = False
        self.has_rewards = False
        """Whether the agent has given a turn a reward."""
        self.refused_reward = ""
        """Why the first reward that could not be taken was refused; empty if there is none."""
        self._takes_rewards = turn_rewards
        self._by_id: dict[str, Turn] = {}
        """The turns by the ids of their answers, of answers that are one turn."""
        self._model = model
        self._agent_sampling = agent_sampling
        self._conversations = Histories(model.chat)
        self._writing = asyncio.Lock()
        self._open = 0
        """Requests in progress, and those that wait."""
        self._places = asyncio.Semaphore(limits.requests_at_once)
        self._turns_begun = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Counts a request during its block, which begins in its turn.

        Raises `GatewayRefused` if too many wait; notes every refusal.
        """
        try:
            if self._open >= self.limits.requests_at_once + self.limits.requests_waiting:
                raise GatewayRefused(
                    f"{self._open} requests of this rollout are in progress or wait; wait for one of them",
                    status=429,
                    code="too_many_requests",
                )
            self._open += 1
            self.times.request_began()
            try:
                async with self._places:
                    if self.has_ended:
                        raise GatewayRefused("the rollout has ended", status=410, code="rollout_ended")
                    yield
            finally:
                self._open -= 1
                self.times.request_ended()
        except GatewayRefused as refusal:
            text = clipped(f"{refusal.status}: {refusal.message}", _LONGEST_ERROR)
            self.errors.append(text.encode(errors="backslashreplace").decode())
            raise

    async def chat(self, fields: dict[str, Any]) -> tuple[dict[str, Any], Asked]:
        """Returns the answer to a chat request, and what was asked. Raises `GatewayRefused`."""
        request = self._read(fields)
        choices = await self._ended_with_session(self._chat(request))
        log_probabilities = request.asked.log_probabilities
        write = partial(chat_answer, choices, self._model.chat, log_probabilities=log_probabilities)
        return self._named(await self._written(choices, write), choices), request.asked

    async def respond(self, fields: dict[str, Any]) -> tuple[dict[str, Any], Asked]:
        """The same for a request of the Responses API."""
        places = dict(responses_request.PLACES)
        read = responses_request.chat_fields(fields, places)
        with named_as(places, responses_request.WORDS):
            request = self._read(read)
            [choice] = await self._ended_with_session(self._chat(request))
        log_probabilities = request.asked.log_probabilities
        write = partial(responses_answer, choice, fields, self._model.chat, log_probabilities=log_probabilities)
        return self._named(await self._written([choice], write), [choice]), request.asked

    async def message(self, fields: dict[str, Any]) -> tuple[dict[str, Any], Asked]:
        """The same for a request of Anthropic's Messages API."""
        with self._of_anthropic(fields) as request:
            [choice] = await self._ended_with_session(self._chat(request))
        return self._named(anthropic_answer(choice), [choice]), request.asked

    async def count_tokens(self, fields: dict[str, Any]) -> dict[str, int]:
        """Returns how many tokens the prompt of such a request has, as Anthropic's API answers. Raises `GatewayRefused`."""
        with self._of_anthropic(fields) as request:
            return {"input_tokens": len(await self._ended_with_session(self._prompt(request)))}

    @contextmanager
    def _of_anthropic(self, fields: dict[str, Any]) -> Iterator[ChatRequest]:
        """The chat request of the same meaning; refusals in the block have the names of Anthropic's API."""
        places = dict(anthropic_request.PLACES)
        read = anthropic_request.chat_fields(fields, self._model.chat, places)
        with named_as(places, anthropic_request.WORDS):
            request, deferred = self._read(read), anthropic_request.deferred_tools(fields)
            yield replace(request, tools=[tool for tool in request.tools if tool["function"]["name"] not in deferred])

    def _read(self, fields: dict[str, Any]) -> ChatRequest:
        model = self._model
        return chat_request(fields, model.sampling, model.chat, agent_sampling=self._agent_sampling)

    async def complete(self, fields: dict[str, Any]) -> tuple[dict[str, Any], Asked]:
        """The same for a completions request."""
        chat = self._model.chat
        request = completion_request(fields, self._model.sampling, chat.vocabulary, agent_sampling=self._agent_sampling)
        return await self._ended_with_session(self._complete(request)), request.asked

    def reward(self, content: bytes) -> dict[str, Any]:
        """Gives a turn the `reward` in this JSON object, and returns both.

        `turn` is its number in `turns`, or its answer's id; the newest turn gets it if that is left out. Raises `GatewayRefused`,
        and notes that in `refused_reward` unless the environment takes no rewards.
        """
        if not self._takes_rewards:
            raise GatewayRefused("no rewards of turns are taken here; args.turn_rewards = true takes them", status=403)
        try:
            fields = parse_body(content)
            check_names(fields, ("turn", "reward"), {}, {})
            turn, number = self._turn_of(fields.get("turn")), fields.get("reward")
            if not isinstance(number, int | float) or isinstance(number, bool):
                refuse("reward", number, "expected a number")
            value = _as_float(number)
            try:
                self._model.reward(value, turn)
            except ValueError as error:
                raise GatewayRefused(str(error), parameter="reward") from error
            except RuntimeError as error:
                raise _ended() from error
        except GatewayRefused as refusal:
            self.refused_reward = self.refused_reward or clipped(refusal.message, _LONGEST_ERROR)
            raise
        self.has_rewards = True
        return {"turn": next(index for index, each in enumerate(self.turns) if each is turn), "reward": value}

    def _turn_of(self, named: object) -> Turn:
        """Returns the turn of a number or an answer's id; the newest for None. Raises `GatewayRefused`."""
        if named is None and self.turns:
            return self.turns[-1]
        if isinstance(named, str) and named in self._by_id:
            return self._by_id[named]
        if type(named) is int and 0 <= named < len(self.turns):
            return self.turns[named]
        refuse("turn", named, f"expected a number below {len(self.turns)}, or the id of an answer with one choice")

    async def end(self) -> None:
        """Ends the requests in progress; later ones are refused."""
        self.has_ended = True
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_END_SECONDS)

    async def _ended_with_session(self, work: Coroutine[Any, Any, Made]) -> Made:
        """Awaits `work` in a task that the session's end cancels, and so does the client's disconnection."""
        if self.has_ended:  # while the request's body arrived
            work.close()
            raise _ended()
        task: asyncio.Task[Made] = asyncio.create_task(work, name="a request at the gateway")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if self.has_ended:
                raise _ended() from None
            raise

    async def _chat(self, request: ChatRequest) -> list[Choice]:
        choices = await self._choices([await self._prompt(request)], request)
        conversations = self._conversations.rendered_with(request.template_kwargs)
        for choice in choices:
            # Some agents write the stop string back, as smolagents does; the turn's tokens have it.
            for text in {choice.text, choice.text and choice.text + (choice.ended_by or "")}:
                [answer] = template_messages([assistant_message(replace(choice, text=text))])
                conversations.remember(request.messages, request.tools, answer, choice.turn)
        return choices

    async def _prompt(self, request: ChatRequest) -> Sequence[int]:
        conversations = self._conversations.rendered_with(request.template_kwargs)
        try:
            # All that a template may write: calls, reasoning and tools are text as well.
            length = len(dumps([request.messages, request.tools]))
            return await _off_the_loop(length, conversations.prompt, request.messages, request.tools)
        except Exception as error:  # a template may fail in any way at messages that it does not expect
            raise GatewayRefused(f"{type(error).__name__}: {error}", parameter="messages") from error

    async def _complete(self, request: CompletionRequest) -> dict[str, Any]:
        prompts: list[Sequence[int]] = [
            await _off_the_loop(len(prompt), self._conversations.text_prompt, prompt)
            if isinstance(prompt, str)
            else prompt
            for prompt in request.prompts
        ]
        choices = await self._choices(prompts, request)
        texts = [prompt for prompt in request.prompts for _ in range(request.asked.choices)]
        for text, choice in zip(texts, choices, strict=True):
            if isinstance(text, str):
                cut = self._model.chat.decode(choice.turn.completion_ids.tolist())[len(choice.text) :]
                self._conversations.remember_text(text, choice.text, cut, choice.turn)
        asked = request.asked
        chat, log_probabilities = self._model.chat, asked.log_probabilities
        write = partial(completion_answer, choices, chat, prompts=len(prompts), log_probabilities=log_probabilities)
        return self._named(await self._written(choices, write), choices)

    async def _choices(
        self, prompts: Sequence[Sequence[int]], request: ChatRequest | CompletionRequest
    ) -> list[Choice]:
        """Generates the turns of a request at once; returns them in order. If one fails, none of them is trained."""
        each = [prompt for prompt in prompts for _ in range(request.asked.choices)]
        if self._turns_begun + len(each) > self.limits.turns:
            raise GatewayRefused(
                f"the rollout has had {self._turns_begun} turns; at most {self.limits.turns} are made",
                status=403,
                code="too_many_turns",
            )
        self._turns_begun += len(each)
        made: list[Turn] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._choice(prompt, request, made)) for prompt in each]
        except BaseException as errors:
            for turn in made:
                turn.leave_untrained()  # the agent never read it
            if isinstance(errors, ExceptionGroup):
                raise _refusal(errors.exceptions[0]) from errors
            raise
        choices = [task.result() for task in tasks]
        self.turns += [choice.turn for choice in choices]
        return choices

    def _named(self, answer: dict[str, Any], choices: Sequence[Choice]) -> dict[str, Any]:
        """Returns an answer, whose id names its turn from now on if it is one."""
        if len(choices) == 1:
            self._by_id[answer["id"]] = choices[0].turn
        return answer

    async def _choice(
        self, prompt: Sequence[int], request: ChatRequest | CompletionRequest, made: list[Turn]
    ) -> Choice:
        """Adds the turn to `made` as soon as it is generated."""
        turn = await self._model.generate(prompt, request.asked.overrides)
        made.append(turn)
        text = self._model.chat.decode(turn.completion_ids.tolist())
        if isinstance(request, CompletionRequest):
            reply = Reply(text)
        else:
            reply = await reply_to(request, self._model, turn)
            if problem := unsendable(reply) or ("" if reply.calls else reply.malformed):
                # Calls that cannot be parsed are text to the agent, as they are at a plain server.
                reply = Reply(text, malformed=problem)
        self.last_reply = reply
        return choice_of(turn, reply, request.asked.stop, self._model.chat)

    async def _written(self, choices: Sequence[Choice], write: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Calls `write`, in a thread if it has to write many most probable tokens: 300,000 of them take over a second.

        One at a time, since that takes memory, too.
        """
        tokens = sum(each.turn.alternatives.token_ids_TK.size for each in choices if each.turn.alternatives is not None)
        if tokens <= LONG_TEXT:
            return write()
        async with self._writing:
            return await asyncio.to_thread(write)


async def reply_to(request: ChatRequest, model: Model, turn: Turn) -> Reply:
    """Returns what a turn answers to a request. A model that reasons does so, unconstrained, before calls that are demanded.

    A parser of calls reads no constrained answer: it would take JSON with a name for a call. Raises `GatewayRefused` for an
    answer that was to be constrained and was not.
    """
    overrides = request.asked.overrides
    text = said = model.chat.decode(turn.completion_ids.tolist())
    if request.demanded_tools and text.lstrip().startswith("["):
        reply = read_demanded(text, request.demanded_tools)
    else:
        reply = await model.parse(turn, [] if overrides.json_schema else request.parsed_tools, reasoning=True)
        said = reply.content
        if request.demanded_tools:
            reply = replace(read_demanded(said, request.demanded_tools), reasoning=reply.reasoning)
    if overrides.json_schema:
        _warn_of_constraints()
        stop = model.sampling.stop if overrides.stop is None else overrides.stop
        if turn.finish_reason == "stop" and choice_of(turn, reply, stop, model.chat).ended_by is None:
            check_kept(said, overrides.json_schema)
    return replace(reply, calls=reply.calls[:1]) if request.one_call else reply


async def _off_the_loop(
    length: int, prompt: Callable[Parameters, Sequence[int]], *given: Parameters.args, **named: Parameters.kwargs
) -> Sequence[int]:
    """Calls `prompt`, in a thread if it may have to encode a long text."""
    if length <= LONG_TEXT:
        return prompt(*given, **named)
    return await asyncio.to_thread(prompt, *given, **named)


@cache
def _warn_of_constraints() -> None:
    """Logs it once: every rollout of such an agent constrains."""
    _logger.warning(_UNTRAINED)


def _as_float(number: float) -> float:
    """Returns a number as a float; one that is too large is infinite."""
    try:
        return float(number)
    except OverflowError:  # an integer of over 308 digits
        return math.inf


def _ended() -> GatewayRefused:
    return GatewayRefused("the rollout has ended", status=410, code="rollout_ended")


def _refusal(error: BaseException) -> GatewayRefused:
    """What an agent is told of a failed call. A refused prompt is its own; for the rest it may ask again."""
    if isinstance(error, GatewayRefused):
        return error
    text = clipped(str(error), _LONGEST_ERROR)
    if isinstance(error, ValueError):
        return GatewayRefused(text, code="context_length_exceeded" if "length" in text or "long" in text else None)
    if isinstance(error, NotImplementedError):
        return GatewayRefused(text, status=501)
    return GatewayRefused(f"the model did not answer: {type(error).__name__}: {text}", status=503)
