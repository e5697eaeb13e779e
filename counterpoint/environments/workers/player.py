"""Plays and scores, in a worker, the sessions that the orchestrator asks for.

Whatever a session raises ends that session only.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from counterpoint.environments.base import Environment, Unavailable, answer_of
from counterpoint.environments.chat import Chat
from counterpoint.environments.describe_error import describe_error
from counterpoint.environments.reward import Rewards, as_group_rewards, as_rewards
from counterpoint.environments.workers import protocol
from counterpoint.environments.workers.protocol import Message
from counterpoint.environments.workers.remote_model import RemoteModel
from counterpoint.transport.printable import clipped
from counterpoint.transport.records import Rollout

_CANCEL_SECONDS = 5.0
"""How long sessions may take to end when the connection has."""

Outcome = tuple[list[float | dict[str, float]] | None, list[Any]]
"""Rewards, if it was scored, and the results of `protocol.result_of`."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """What an environment raised."""

    error: str
    unavailable: bool = False


_CANCELLED = _Failure("the environment cancelled itself: CancelledError came out of its code")


class _InHand:
    """A rollout or a group that this worker has in hand."""

    def __init__(self, task: asyncio.Task[Outcome | _Failure], model: RemoteModel | None) -> None:
        self.task = task
        self.model = model


class Player:
    """The sessions of one connection. `send` takes a message and the size of the arrays in it."""

    def __init__(self, environment: Environment, model: Path, send: Callable[[Message, int], None]) -> None:
        self._environment = environment
        self._model = model
        self._sessions: dict[int, _InHand] = {}
        self._chats: dict[str, Chat] = {}
        self._send = send
        self._chat("{}")  # reading it takes a moment, which no rollout should wait for

    def received(self, message: Message) -> None:
        """Takes a message about a session."""
        kind = message[0]
        if kind in (protocol.TURN, protocol.REPLY, protocol.FAILURE):
            session = self._sessions.get(message[1])
            if session is not None and session.model is not None:
                session.model.answer(message)
        elif kind == protocol.PLAY:
            self._play(message)
        elif kind == protocol.SCORE:
            self._begin(message[1], None, self._scored(message))
        elif kind == protocol.CANCEL and (session := self._sessions.get(message[1])) is not None:
            session.task.cancel()

    async def close(self) -> None:
        """Cancels all sessions."""
        tasks = [session.task for session in self._sessions.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)

    def _play(self, message: Message) -> None:
        _, number, example, identity, sampling, template, scored = message
        model = RemoteModel(number, protocol.rollout_of(identity), self._chat(template), sampling, self._send)
        self._begin(number, model, self._played(model, example, scored))

    def _begin(self, number: int, model: RemoteModel | None, work: Coroutine[Any, Any, Outcome]) -> None:
        task = asyncio.create_task(_outcome_of(work))
        self._sessions[number] = _InHand(task, model)
        task.add_done_callback(lambda task: self._ended(number, model, work, task))

    def _ended(
        self,
        number: int,
        model: RemoteModel | None,
        work: Coroutine[Any, Any, Outcome],
        task: asyncio.Task[Outcome | _Failure],
    ) -> None:
        """Reports a session's result, or what it raised."""
        work.close()  # it never began if the session was cancelled at once
        if model is not None:
            model.close()
        self._sessions.pop(number, None)
        answer = None if model is None else model.rollout.answer
        outcome = _CANCELLED if task.cancelled() else task.result()
        if isinstance(outcome, _Failure):
            error = clipped(outcome.error, protocol.MAX_ERROR)
            self._send([protocol.DONE, number, error, None, [], outcome.unavailable, answer], 0)
            return
        rewards, results = outcome
        size = sum(len(each[0]) + len(each[1]) for each in results)
        self._send([protocol.DONE, number, None, rewards, results, False, answer], size)

    async def _played(self, model: RemoteModel, index: int, scored: bool) -> Outcome:
        rollout = model.rollout
        example = self._environment.example(index)
        rollout.answer = answer_of(example)
        await self._environment.rollout(example, model, rollout.state)
        rollout.turn_rewards = model.turn_rewards.array()
        rewards = None
        if scored:
            score = self._environment.score
            value = await score(example, rollout)
            rollout.turn_rewards = model.turn_rewards.array()  # a reward may come late
            rewards = [_scored_of(rollout, as_rewards(value, score, rollout))]
        return rewards, [protocol.result_of(rollout, model.turns)]

    async def _scored(self, message: Message) -> Outcome:
        _, _, index, packed, grouped = message
        rollouts: list[Rollout] = [protocol.unpack_rollout(each) for each in packed]
        example = self._environment.example(index)
        if grouped:
            values = await self._environment.score_group(example, list(rollouts))
            rewards = as_group_rewards(values, rollouts, self._environment.score_group)
        else:
            score = self._environment.score
            rewards = [as_rewards(await score(example, rollouts[0]), score, rollouts[0])]
        scores = [_scored_of(rollout, each) for rollout, each in zip(rollouts, rewards, strict=True)]
        return scores, [protocol.result_of(rollout, list(enumerate(rollout.turns))) for rollout in rollouts]

    def _chat(self, template: str) -> Chat:
        """Returns the chat with the template's variables, given as JSON."""
        if "{}" not in self._chats:
            self._chats["{}"] = _load_chat(str(self._model))
        if template not in self._chats:
            if len(self._chats) > 64:
                self._chats = {"{}": self._chats["{}"]}
            self._chats[template] = self._chats["{}"].with_template_kwargs(json.loads(template))
        return self._chats[template]


def _scored_of(rollout: Rollout, rewards: Rewards) -> float | dict[str, float]:
    """Returns a reward as plain numbers, and leaves the rewards of turns in the rollout."""
    rollout.turn_rewards = rewards.turns
    return rewards.by_player or rewards.reward


class _NoChat:
    """Stands for the chat of a model directory that has none, for environments that need none."""

    template_kwargs: ClassVar[dict[str, Any]] = {}

    def __init__(self, error: str) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise ValueError(self._error)


def _load_chat(model: str) -> Chat:
    try:
        return Chat(model)
    except ValueError as error:
        return cast(Chat, _NoChat(str(error)))


async def _outcome_of(work: Coroutine[Any, Any, Outcome]) -> Outcome | _Failure:
    """Returns the outcome of an environment's work, or the text of what it raised: a task's `SystemExit` would end the loop."""
    try:
        return await work
    except asyncio.CancelledError:
        return _CANCELLED
    except BaseException as failure:  # noqa: BLE001 - an environment may raise anything; it costs one rollout
        return _Failure(describe_error(failure), isinstance(failure, Unavailable))
