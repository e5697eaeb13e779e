"""A rollout that a worker plays, at the orchestrator's end: it calls the model as the worker asks, and waits for the result.

One call at a time is made in the rollout's own task, since a task more for each turn costs a loop with thousands of rollouts;
only a call beside another has a task of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from counterpoint.environments.base import Model, WorkerError
from counterpoint.environments.sampling import CallOverrides
from counterpoint.environments.workers import protocol
from counterpoint.environments.workers.protocol import Message, ProtocolError
from counterpoint.transport.printable import clipped
from counterpoint.transport.records import Turn

Send = Callable[[Message, int], None]


class RemoteSession:
    """One rollout, or the scoring of a group (without a model). `play` is awaited by the rollout's task."""

    def __init__(self, number: int, model: Model | None, deadline: float, send: Send) -> None:
        self.number = number
        self.deadline = deadline
        """Seconds on the loop's clock."""
        self.ended = False
        """The worker has reported its end."""
        self._model = model
        self._send = send
        self._turns: list[Turn] = []
        self._inbox: deque[Message | WorkerError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._call = 0
        """The call that the rollout's task makes; 0: none."""
        self._interrupted = False
        self._beside: dict[int, asyncio.Task[None]] = {}
        """Calls at the same time as that one."""

    async def play(self) -> Message:
        """Makes the calls that come; returns the worker's `DONE`. Raises `WorkerError`."""
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        try:
            while True:
                if not self._inbox:
                    self._waiter = loop.create_future()
                    await self._waiter
                event = self._inbox.popleft()
                if isinstance(event, WorkerError):
                    raise event
                if event[0] == protocol.DONE:
                    return event
                await self._make(event)
        finally:
            self._task = None
            for task in self._beside.values():
                task.cancel()

    def result(self, done: Message) -> protocol.EnvironmentResult:
        """Returns what a `DONE` says of the rollout; sets masks and gives rewards to turns.

        Raises `WorkerError` for what does not fit.
        """
        results = done[4]
        if len(results) != 1:
            raise WorkerError(f"its worker sent {len(results)} results; expected 1")
        try:
            result = protocol.take_result(results[0], self._turns)
            for number, reward in (result.turn_rewards or {}).items():
                assert self._model is not None
                self._model.reward(reward, self._turns[number])
        except (ProtocolError, ValueError) as error:
            raise WorkerError(f"its worker sent {error}") from None
        return result

    def received(self, message: Message) -> None:
        """Takes a message of the worker about this session. Raises `ProtocolError` for one that cannot be."""
        kind = message[0]
        if kind == protocol.DONE:
            self.ended = True
            self._push(message)
        elif self._task is None or self._model is None:
            return  # the rollout's task has gone; the worker is about to hear it
        elif kind == protocol.ABANDON:
            self._abandon(message[2])
        elif len(self._beside) + len(self._inbox) >= protocol.MAX_CALLS:
            raise ProtocolError(f"more than {protocol.MAX_CALLS} model calls of one rollout at once")
        else:
            self._check(message)
            if self._call or self._inbox:
                self._start_beside(message)
            else:
                self._push(message)

    def fail(self, error: WorkerError) -> None:
        """Ends the session with an error: its worker is gone."""
        self.ended = True
        self._push(error)

    def _push(self, event: Message | WorkerError) -> None:
        self._inbox.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        elif self._call and (isinstance(event, WorkerError) or event[0] == protocol.DONE):
            self._interrupt()

    def _check(self, message: Message) -> None:
        if message[0] == protocol.GENERATE:
            _, _, _, _, base, overrides, rest = message
            if (
                not -1 <= base < len(self._turns)
                or len(rest) % 4
                or not (overrides is None or isinstance(overrides, dict))
            ):
                raise ProtocolError("a call of the model that cannot be")
        elif not 0 <= message[3] < len(self._turns):
            raise ProtocolError("a turn to parse that there is not")

    # --- calls ---

    async def _make(self, message: Message) -> None:
        """Makes a call in the rollout's task, unless it is interrupted."""
        self._call, self._interrupted = message[2], False
        try:
            await self._answer(message)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._interrupted or task is None or task.uncancel():
                raise
        finally:
            self._call = 0

    def _interrupt(self) -> None:
        if not self._interrupted and self._task is not None:
            self._interrupted = True
            self._task.cancel()

    def _abandon(self, call: int) -> None:
        if call == self._call:
            self._interrupt()
        elif (task := self._beside.get(call)) is not None:
            task.cancel()

    def _start_beside(self, message: Message) -> None:
        call = message[2]
        if call in self._beside:
            raise ProtocolError("a call with the number of another")
        task = asyncio.create_task(self._answer(message), name=f"call of session {self.number}")
        self._beside[call] = task
        task.add_done_callback(lambda task: self._beside.pop(call, None))

    async def _answer(self, message: Message) -> None:
        kind, _, call = message[:3]
        assert self._model is not None
        try:
            if kind == protocol.GENERATE:
                model = _seat(self._model, message[3])
                turn = await model.generate(self._prompt(message[4], message[6]), _overrides(message[5]))  # type: ignore[arg-type]
                self._turns.append(turn)
                told = [protocol.TURN, self.number, call, len(self._turns) - 1, protocol.pack_answer(turn)]
                self._send(told, protocol.answer_bytes(turn))
                return
            reply = await self._model.parse(self._turns[message[3]], message[4], reasoning=message[5])
            calls = [[each.id, each.name, each.arguments] for each in reply.calls]
            self._send([protocol.REPLY, self.number, call, [reply.content, reply.reasoning, calls, reply.malformed]], 0)
        except Exception as error:  # noqa: BLE001 - the environment sees it, as it would without a worker
            self._send(
                [protocol.FAILURE, self.number, call, type(error).__name__, clipped(str(error), protocol.MAX_ERROR)], 0
            )

    def _prompt(self, base: int, rest: bytes) -> Sequence[int] | np.ndarray[Any, np.dtype[np.int32]]:
        if base < 0:
            return np.frombuffer(rest, np.int32)
        turn = self._turns[base]
        return np.frombuffer(b"".join((turn.prompt_ids.tobytes(), turn.completion_ids.tobytes(), rest)), np.int32)


def _overrides(given: dict[str, Any] | None) -> CallOverrides | None:
    return None if given is None else CallOverrides.model_validate(given)


def _seat(model: Model, seat: str) -> Model:
    """Returns the model of a player or an opponent."""
    if not seat:
        return model
    if seat.startswith(protocol.PLAYER):
        return model.player(seat.removeprefix(protocol.PLAYER))
    return model.opponent(seat.removeprefix(protocol.OPPONENT))
