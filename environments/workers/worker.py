"""One worker: it loads an environment and plays rollouts as it is told, until it is told to leave or is killed.

    python -P -m environments.workers.worker < BOOT

What it needs to know comes as JSON on its standard input, which holds its token, too. It has a guardian
(`transport/process/launch.py`), which kills whatever is left of it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import resource
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvloop
import zmq

from environments.base import Environment, EnvironmentContext, Score, Unavailable
from environments.chat import Chat
from environments.config import EnvironmentConfig
from environments.describe_error import describe_error
from environments.lifecycle import started
from environments.reward import as_rewards
from environments.workers import protocol
from environments.workers.boot import Boot
from environments.workers.process import STACK_SIGNAL
from environments.workers.protocol import Message
from environments.workers.remote_model import RemoteModel
from environments.workers.wire import BatchingWire
from transport.records import Rollout

BEAT_SECONDS = 0.2

_LEAVE_SECONDS = 2.0
"""How long what was sent last may take."""


Outcome = tuple[list[Score] | None, list[Any]]
"""Rewards, if it was scored, and the results of `protocol.result_of`."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What an environment raised."""

    error: str
    unavailable: bool = False


_CANCELLED = Failure("the environment cancelled itself: CancelledError came out of its code")


class Session:
    """A rollout or a group that this worker has in hand."""

    def __init__(self, task: asyncio.Task[Outcome | Failure], model: RemoteModel | None) -> None:
        self.task = task
        self.model = model


class Worker:
    """The worker on its loop."""

    def __init__(self, boot: Boot) -> None:
        self._boot = boot
        self._sessions: dict[int, Session] = {}
        self._environment: Environment
        self._chats: dict[str, Chat] = {}
        self._leaving = asyncio.Event()

    async def run(self) -> None:
        """Serves until told to leave. What fails before the first rollout is reported."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.maxmsgsize = protocol.MAX_FRAME_BYTES
        socket.sndhwm = socket.rcvhwm = 0
        self._boot.secure(socket)
        socket.connect(self._boot.address)
        self._wire = BatchingWire(socket, self._received, lambda peer, error: sys.exit(error))
        self._send([protocol.HELLO, self._boot.token.encode(), os.getpid()])
        self._wire.flush()
        beating = asyncio.create_task(self._beat())
        try:
            await self._serve()
        finally:
            beating.cancel()
            self._wire.close(_LEAVE_SECONDS)
            context.term()

    async def _serve(self) -> None:
        from environments.registry import load_here  # loads the operator's module: after HELLO

        config = EnvironmentConfig.model_validate(self._boot.environment)
        context = EnvironmentContext(config.name, Path(self._boot.directory), Path(self._boot.model), self._boot.seed)
        try:
            self._environment = load_here(config)
            async with started(self._environment, context):
                self._chat("{}")  # reading it takes a moment, which no rollout should wait for
                self._send([protocol.READY, len(self._environment), self._environment.group_scoring])
                await self._leaving.wait()
                for session in self._sessions.values():
                    session.task.cancel()
        except ValueError as error:
            self._send([protocol.UNABLE, str(error)[: protocol.MAX_ERROR]])

    async def _beat(self) -> None:
        """Tells that the loop runs, and how late it was."""
        while True:
            due = time.monotonic() + BEAT_SECONDS
            await asyncio.sleep(BEAT_SECONDS)
            self._send([protocol.BEAT, max(0.0, time.monotonic() - due)])

    def _send(self, message: Message, nbytes: int = 0) -> None:
        self._wire.send(b"", message, nbytes)

    def _received(self, peer: bytes, message: Message) -> None:
        kind = message[0]
        if kind in (protocol.TURN, protocol.REPLY, protocol.FAILURE):
            session = self._sessions.get(message[1])
            if session is not None and session.model is not None:
                session.model.answer(message)
        elif kind == protocol.PLAY:
            self._play(message)
        elif kind == protocol.SCORE:
            self._begin(message[1], None, self._scored(message))
        elif kind == protocol.CANCEL:
            if (session := self._sessions.get(message[1])) is not None:
                session.task.cancel()
        elif kind == protocol.LEAVE:
            self._leaving.set()

    def _play(self, message: Message) -> None:
        _, number, example, identity, sampling, template, scored = message
        model = RemoteModel(number, protocol.rollout_of(identity), self._chat(template), sampling, self._send)
        self._begin(number, model, self._played(model, example, scored))

    def _begin(self, number: int, model: RemoteModel | None, work: Coroutine[Any, Any, Outcome]) -> None:
        task = asyncio.create_task(_outcome_of(work))
        self._sessions[number] = Session(task, model)
        task.add_done_callback(lambda task: self._ended(number, model, work, task))

    def _ended(
        self,
        number: int,
        model: RemoteModel | None,
        work: Coroutine[Any, Any, Outcome],
        task: asyncio.Task[Outcome | Failure],
    ) -> None:
        """Reports a session's result, or what it raised."""
        work.close()  # it never began if the session was cancelled at once
        if model is not None:
            model.close()
        self._sessions.pop(number, None)
        outcome = _CANCELLED if task.cancelled() else task.result()
        if isinstance(outcome, Failure):
            self._send([protocol.DONE, number, outcome.error[: protocol.MAX_ERROR], None, [], outcome.unavailable])
            return
        rewards, results = outcome
        self._send(
            [protocol.DONE, number, None, rewards, results, False], sum(len(each[0]) + len(each[1]) for each in results)
        )

    async def _played(self, model: RemoteModel, index: int, scored: bool) -> Outcome:
        rollout = model.rollout
        example = self._environment.example(index)
        await self._environment.rollout(example, model, rollout.state)
        rewards = None
        if scored:
            rewards = [_score_of(await self._environment.score(example, rollout))]
        return rewards, [protocol.result_of(rollout, model.turns)]

    async def _scored(self, message: Message) -> Outcome:
        _, _, index, packed, grouped = message
        rollouts: list[Rollout] = [protocol.unpack_rollout(each) for each in packed]
        example = self._environment.example(index)
        if grouped:
            values = list(await self._environment.score_group(example, list(rollouts)))
            if len(values) != len(rollouts):
                raise ValueError(f"score_group returned {len(values)} rewards for {len(rollouts)} rollouts")
        else:
            values = [await self._environment.score(example, rollouts[0])]
        results = [protocol.result_of(rollout, list(enumerate(rollout.turns))) for rollout in rollouts]
        return [_score_of(value) for value in values], results

    def _chat(self, template: str) -> Chat:
        """Returns the chat with the template's variables, given as JSON."""
        if "{}" not in self._chats:
            self._chats["{}"] = _load_chat(self._boot.model)
        if template not in self._chats:
            if len(self._chats) > 64:
                self._chats = {"{}": self._chats["{}"]}
            self._chats[template] = self._chats["{}"].with_template_kwargs(json.loads(template))
        return self._chats[template]


def _score_of(value: object) -> Score:
    """Returns a reward as plain numbers. Raises `TypeError` or `ValueError` for what is none."""
    reward, by_player = as_rewards(value)
    return by_player or reward


class _NoChat:
    """Stands for the chat of a model directory that has none, for environments that need none."""

    def __init__(self, error: str) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise ValueError(self._error)


def _load_chat(model: str) -> Chat:
    try:
        return Chat(model)
    except ValueError as error:
        return cast(Chat, _NoChat(str(error)))


async def _outcome_of(work: Coroutine[Any, Any, Outcome]) -> Outcome | Failure:
    """Returns the outcome of an environment's work, or the text of what it raised: a task's `SystemExit` would end the loop."""
    try:
        return await work
    except asyncio.CancelledError:
        return _CANCELLED
    except BaseException as failure:  # noqa: BLE001 - an environment may raise anything; it costs one rollout
        return Failure(describe_error(failure), isinstance(failure, Unavailable))


def _confine(boot: Boot) -> None:
    """Takes what the process must not have: core files, the orchestrator's place when memory runs out, endless processes."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # the kernel takes a worker first
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if boot.most_user_processes and os.getuid() != 0:  # the kernel counts a user's processes, and does not count root's
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        most = boot.most_user_processes if hard == resource.RLIM_INFINITY else min(hard, boot.most_user_processes)
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def main() -> int:
    """Runs the worker. An environment's `SystemExit` that reaches the loop does not end it."""
    boot = Boot.read(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _confine(boot)
    faulthandler.enable()
    with open(boot.stack_file, "w") as stacks:
        faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            loop = runner.get_loop()

            async def work() -> None:
                await Worker(boot).run()

            task = loop.create_task(work())
            while True:
                try:
                    loop.run_until_complete(task)
                    return 0
                except (SystemExit, KeyboardInterrupt):
                    if task.done():
                        raise


if __name__ == "__main__":
    sys.exit(main())
