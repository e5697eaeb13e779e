"""The model of a rollout in a worker: it asks the orchestrator, which calls the servers and records the turns.

A prompt that extends an earlier turn is sent as that turn's number and the tokens that follow, so that a long context travels
once. What comes back is the completion, without routing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from counterpoint.environments.base import Model, Reply, ToolCall
from counterpoint.environments.chat import Chat, Tool
from counterpoint.environments.reward import NO_TURN_OF_OURS, TurnRewards
from counterpoint.environments.sampling import CallOverrides, SamplingConfig, SamplingOverrides
from counterpoint.environments.workers import protocol
from counterpoint.environments.workers.protocol import Message
from counterpoint.transport.records import Rollout, Turn

_TIPS = 8
"""Turns that the next prompt may extend: the newest ones that no other has extended."""


class ModelCallError(RuntimeError):
    """A call of the model failed in the orchestrator. The class has the name of the error there."""


class RemoteModel:
    """`environments.base.Model` of one rollout. Appends every turn to `rollout.turns`; calls may overlap."""

    def __init__(
        self,
        session: int,
        rollout: Rollout,
        chat: Chat,
        sampling: dict[str, Any],
        send: Callable[[Message, int], None],
    ) -> None:
        self._session = session
        self.rollout = rollout
        self.chat = chat
        self._sampling = sampling
        self._send = send
        self._calls: dict[int, tuple[asyncio.Future[Any], bytes, str]] = {}
        """The calls without an answer yet, with their prompts and seats."""
        self._number = 0
        self._turns: dict[int, tuple[int, Turn]] = {}
        """The turns by identity: the number that the orchestrator has for a turn."""
        self._tips: dict[int, bytes] = {}
        """The tips by number: prompt and completion of the turns that the next prompt may extend."""
        self._has_ended = False
        self.turn_rewards = TurnRewards(rollout.turns)

    @property
    def sampling(self) -> SamplingConfig:
        """See `environments.base.Model`."""
        return SamplingConfig(**self._sampling)

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingOverrides | None = None) -> Turn:
        """See `environments.base.Model`. Raises as the orchestrator's model does, with errors of the same names."""
        return await self.generate_at("", prompt_ids, sampling)

    async def generate_at(self, seat: str, prompt_ids: Sequence[int], sampling: SamplingOverrides | None) -> Turn:
        """Does as `generate`, at a seat (see `protocol.GENERATE`)."""
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        if prompt.ndim != 1 or not prompt.size:
            raise ValueError(
                f"a prompt must be a flat, non-empty sequence of token ids; this one has shape {prompt.shape}"
            )
        tokens = prompt.tobytes()
        base, rest = self._extended(tokens)
        overrides = None if sampling is None else sampling.model_dump(mode="json", exclude_none=True)
        turn = await self._call(protocol.GENERATE, [seat, base, overrides, rest], tokens, len(rest), seat)
        assert isinstance(turn, Turn)
        if isinstance(sampling, CallOverrides) and sampling.json_schema:
            turn.leave_untrained()
        return turn

    async def parse(self, turn: Turn, tools: Sequence[Tool] = (), *, reasoning: bool = False) -> Reply:
        """See `environments.base.Model`."""
        index, _ = self._turns.get(id(turn), (-1, turn))
        if index < 0:
            raise ValueError("this turn is not one that this rollout's model has generated")
        content, thought, calls, malformed = await self._call(
            protocol.PARSE, [index, [dict(tool) for tool in tools], reasoning], b"", 0
        )
        return Reply(content, thought, tuple(ToolCall(*call) for call in calls), malformed)

    def reward(self, value: float, turn: int | Turn | None = None) -> None:
        """See `environments.base.Model`."""
        self.reward_at("", value, turn)

    def reward_at(self, seat: str, value: float, turn: int | Turn | None) -> None:
        """Does as `reward`, at a seat (see `protocol.GENERATE`)."""
        if self._has_ended:
            raise RuntimeError(f"rollout {self.rollout.rollout_id} has ended; its turns get no further reward")
        if seat.startswith(protocol.OPPONENT):
            raise ValueError(NO_TURN_OF_OURS.format(seat.removeprefix(protocol.OPPONENT)))
        self.turn_rewards.give(value, turn, seat.removeprefix(protocol.PLAYER))

    def player(self, name: str) -> Model:
        """See `environments.base.Model`."""
        return SeatModel(self, f"{protocol.PLAYER}{name}")

    def opponent(self, name: str) -> Model:
        """See `environments.base.Model`. A name that is not configured is an error of the first call."""
        return SeatModel(self, f"{protocol.OPPONENT}{name}")

    @property
    def turns(self) -> list[tuple[int, Turn]]:
        """The turns with the orchestrator's numbers."""
        return list(self._turns.values())

    def answer(self, message: Message) -> None:
        """Passes the orchestrator's answer to the call that waits for it."""
        kind, _, call, *values = message
        waiting, prompt, seat = self._calls.pop(call, (None, b"", ""))
        if waiting is None or waiting.done():
            if kind == protocol.TURN:
                # The call was cancelled meanwhile: the orchestrator has its turn, and nobody has read it.
                unread = self._add(values[0], values[1], prompt, seat)
                unread.leave_untrained()
                self.turn_rewards.skip(unread)
            return
        if kind == protocol.TURN:
            waiting.set_result(self._add(values[0], values[1], prompt, seat))
        elif kind == protocol.REPLY:
            waiting.set_result(values[0])
        else:
            waiting.set_exception(_error(*values))

    def close(self) -> None:
        """Ends the rollout's calls: those to come, and those that still wait, raise `RuntimeError`."""
        self._has_ended = True
        for waiting, _, _ in self._calls.values():
            if not waiting.done():
                waiting.cancel()
        self._calls.clear()

    async def _call(self, kind: int, values: list[Any], prompt: bytes, nbytes: int, seat: str = "") -> Any:
        if self._has_ended:
            raise RuntimeError(f"rollout {self.rollout.rollout_id} has ended; it takes no further turn")
        if len(self._calls) >= protocol.MAX_CALLS:
            raise RuntimeError(
                f"rollout {self.rollout.rollout_id} has {protocol.MAX_CALLS} model calls at once already"
            )
        self._number += 1
        call = self._number
        waiting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call] = waiting, prompt, seat
        self._send([kind, self._session, call, *values], nbytes)
        try:
            return await waiting
        except asyncio.CancelledError:
            if call in self._calls:
                self._send([protocol.ABANDON, self._session, call], 0)
            raise

    def _add(self, index: int, answer: list[Any], prompt: bytes, seat: str) -> Turn:
        turn = protocol.unpack_answer(prompt, answer)
        if not seat.startswith(protocol.OPPONENT):
            self.rollout.turns.append(turn)
        self._turns[id(turn)] = index, turn
        self._tips[index] = prompt + answer[0]
        if len(self._tips) > _TIPS:
            del self._tips[next(iter(self._tips))]
        return turn

    def _extended(self, prompt: bytes) -> tuple[int, bytes]:
        """Returns the turn that the prompt extends (-1: none), and what it adds to it."""
        found, length = -1, 0
        for index, tokens in self._tips.items():
            end = max(0, len(tokens) - 64)
            if len(tokens) > length and prompt.startswith(tokens[end:], end) and prompt.startswith(tokens):
                found, length = index, len(tokens)
        if found >= 0:
            del self._tips[found]  # the turn to come has its tokens, too; another that extends this one is sent whole
        return found, prompt[length:]


class SeatModel:
    """The model as a player, or another policy, of the same rollout."""

    def __init__(self, model: RemoteModel, seat: str) -> None:
        self.chat = model.chat
        self.sampling = model.sampling
        self._model, self._seat = model, seat

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingOverrides | None = None) -> Turn:
        """See `environments.base.Model`."""
        return await self._model.generate_at(self._seat, prompt_ids, sampling)

    async def parse(self, turn: Turn, tools: Sequence[Tool] = (), *, reasoning: bool = False) -> Reply:
        """See `environments.base.Model`."""
        return await self._model.parse(turn, tools, reasoning=reasoning)

    def reward(self, value: float, turn: int | Turn | None = None) -> None:
        """See `environments.base.Model`."""
        self._model.reward_at(self._seat, value, turn)

    def player(self, name: str) -> Model:
        """Returns another player of the same rollout."""
        return self._model.player(name)

    def opponent(self, name: str) -> Model:
        """See `environments.base.Model`."""
        return self._model.opponent(name)


_ERRORS: dict[str, type[Exception]] = {}


def _error(name: str, text: str) -> Exception:
    for kind in (ValueError, TypeError, NotImplementedError, RuntimeError):
        if name == kind.__name__:
            return kind(text)
    if name not in _ERRORS:
        if len(_ERRORS) >= 100 or not name.isidentifier():
            return ModelCallError(f"{name}: {text}")
        _ERRORS[name] = type(name, (ModelCallError,), {})
    return _ERRORS[name](text)
