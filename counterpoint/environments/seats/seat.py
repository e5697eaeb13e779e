"""The kind `seat`: a run's policy plays in the episodes that another run of the job hosts, and is trained on its own turns.

An example is a key by which the host keeps the rollouts of a group together: they get episodes of one of the host's examples.
So this run needs neither the host's data nor its order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from counterpoint.environments.base import EnvironmentContext, Example, Model, Unavailable
from counterpoint.environments.seats.wire import PROTOCOL, SOCKET_NAME, Connection, NoPartner, PartnerGone
from counterpoint.transport.printable import clipped
from counterpoint.transport.records import Rollout, Turn
from counterpoint.transport.wires.endpoint import socket_path

CONNECT_SECONDS = 0.5
"""Seconds between two attempts to reach a host that is not there yet."""


class Seat:
    """A seat at the table of the environment `host`, which is `RUN/ENVIRONMENT`, in the same job."""

    group_scoring = False
    state_keys = ("example", "reward")

    def __init__(
        self,
        host: str,
        seat: str = "other",
        examples: int = 1_000_000,
        partner_seconds: float = 60.0,
        silence_seconds: float = 240.0,
    ) -> None:
        """Waits `partner_seconds` for an episode, and `silence_seconds` for the host in each of its moves."""
        run, slash, environment = host.partition("/")
        if not (run and slash and environment) or "/" in environment or ".." in (run, environment):
            raise ValueError(f"host = {host!r}: expected RUN/ENVIRONMENT, the id of a run of this job and a name in it")
        self._host, self._run, self._environment = host, run, environment
        self._seat = seat
        self._examples = examples
        self._partner_seconds = partner_seconds
        self._silence_seconds = silence_seconds

    def __len__(self) -> int:
        return self._examples

    def example(self, index: int) -> Example:
        """Returns a key without content: the host knows the task."""
        if not 0 <= index < self._examples:
            raise IndexError(index)
        return Example(index, "")

    async def start(self, context: EnvironmentContext) -> None:
        """Finds out where the host listens; it need not be there yet."""
        job = context.directory.absolute().parents[2]
        self._path = socket_path(job / f"run_{self._run}" / "environments" / self._environment, SOCKET_NAME)

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        """Plays one episode to its end. Leaves `reward`, and the host's `example`, in `state`."""
        async with self._connected() as connection:
            await connection.send(kind="sit", protocol=PROTOCOL, seat=self._seat, key=example.index)
            seated = await self._seated(connection)
            state["example"] = seated.get("example")
            turn: Turn | None = None
            while True:
                match await self._next(connection):
                    case {"kind": "ask", "messages": [*messages]} if all(isinstance(each, dict) for each in messages):
                        prompt: Sequence[int] = (
                            model.chat.start(messages) if turn is None else model.chat.extend(turn, messages)
                        )
                        turn = await model.generate(prompt)
                        await connection.send(kind="answer", text=(await model.parse(turn)).content)
                    case {"kind": "end", "reward": float() | int() as reward} if turn is not None:
                        state["reward"] = float(reward)
                        return
                    case {"kind": "end", "reason": str(reason)}:
                        raise PartnerGone(reason or "the episode ended before this seat was asked anything")
                    case message:
                        raise PartnerGone(f"the host said {str(message.get('kind'))[:64]!r}, which no seat understands")

    async def score(self, example: Example, rollout: Rollout) -> float:
        """Returns the reward that the host gave."""
        return float(rollout.state["reward"])

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> Sequence[float]:
        """Is not used: the host gives each seat its reward."""
        raise NotImplementedError

    async def _seated(self, connection: Connection) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._partner_seconds):
                message = await connection.receive()
        except TimeoutError:
            raise NoPartner(
                f"no partner: {self._host} had no episode within partner_seconds = {self._partner_seconds:g}"
            ) from None
        if message.get("kind") != "seated":
            raise NoPartner(f"no partner: {message.get('reason') or 'the host ended the episode'}")
        return message

    async def _next(self, connection: Connection) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._silence_seconds):
                return await connection.receive()
        except TimeoutError:
            raise PartnerGone(f"{self._host} said nothing for silence_seconds = {self._silence_seconds:g}") from None

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Connection]:
        connection = await self._connect()
        reason = ""
        try:
            yield connection
        except BaseException as error:
            reason = clipped(f"{type(error).__name__}: {error}", 1000)
            raise
        finally:
            connection.end(kind="leave", reason=reason)
            await connection.closed()

    async def _connect(self) -> Connection:
        """Raises `NoPartner` if the host does not listen within `partner_seconds`."""
        try:
            async with asyncio.timeout(self._partner_seconds):
                while True:
                    try:
                        return Connection(*await asyncio.open_unix_connection(self._path), self._host)
                    except OSError as error:
                        if isinstance(error, PermissionError):
                            raise Unavailable(f"{self._path}: {error.strerror}") from error
                        await asyncio.sleep(CONNECT_SECONDS)
        except TimeoutError:
            raise NoPartner(
                f"no partner: {self._host} does not listen at {self._path} after partner_seconds = {self._partner_seconds:g}"
            ) from None
