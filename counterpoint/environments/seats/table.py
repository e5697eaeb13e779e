"""The host's end: a `Table` in an environment, whose episodes have seats that other runs take.

An environment opens its table in `start`, closes it in `close`, and plays each rollout within `Table.episode`. It asks a seat as
it would ask the model, and gives it a reward before the episode ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from counterpoint.environments.base import EnvironmentContext
from counterpoint.environments.chat import Message
from counterpoint.environments.seats.matching import Matcher, Pair
from counterpoint.environments.seats.wire import PROTOCOL, SOCKET_NAME, Connection, NoPartner, PartnerGone
from counterpoint.transport.files.lock import take_lock
from counterpoint.transport.printable import clipped
from counterpoint.transport.unpacked import shown
from counterpoint.transport.wires.endpoint import socket_path

logger = logging.getLogger(__name__)

HELLO_SECONDS = 10.0
"""How long a connection may take to say where it wants to sit."""

MAX_CONNECTIONS = 4096


class _Seat:
    """One seat of another run, from its arrival to its end."""

    def __init__(self, connection: Connection, name: str, key: int) -> None:
        self.connection = connection
        self.name = name
        self.key = key
        self.gone = ""
        """Why it will not answer any more."""
        self.answer: asyncio.Future[str | None] | None = None
        """The answer to the question that it was asked last, until it is answered; None once the player is gone."""
        self.owes = False
        """Whether nobody waits any more for the answer to a question that it was asked."""


class Episode:
    """One rollout of the host with a partner in each seat."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.seats: dict[str, _Seat] = {}
        self.rewards: dict[str, float] = {}
        self.said: list[dict[str, str]] = []
        """What the seats answered, in order, as `{"seat", "text"}`: for the state of the rollout."""

    async def ask(self, seat: str, messages: Sequence[Message]) -> str:
        """Returns what the policy in a seat says to `messages`, which continue its own conversation.

        The first call opens that conversation. Raises `PartnerGone` when the partner has left, or does not answer within the
        table's `answer_seconds`.
        """
        partner = self._partner(seat)
        if partner.gone:
            raise PartnerGone(partner.gone)
        if partner.answer is not None:
            raise RuntimeError(f"seat {seat!r} has not answered yet; ask it one thing after the other")
        partner.answer = asyncio.get_running_loop().create_future()
        seconds = self._table.answer_seconds
        try:
            async with asyncio.timeout(seconds):
                await partner.connection.send(kind="ask", messages=[dict(message) for message in messages])
                text = await partner.answer
            if text is None:
                raise PartnerGone(partner.gone)
        except TimeoutError:
            raise PartnerGone(f"seat {seat!r} did not answer within answer_seconds = {seconds:g}") from None
        finally:
            if not partner.answer.done() or partner.answer.cancelled():
                # What it may still say would be taken for the answer to the next question.
                partner.gone = partner.gone or f"seat {seat!r} owes the answer to an earlier question"
                partner.owes = True
            partner.answer = None
        self.said.append({"seat": seat, "text": text})
        return text

    def reward(self, seat: str, value: float) -> None:
        """Gives a seat its reward, which it gets once the episode has ended without an error."""
        self._partner(seat)
        if not math.isfinite(value):
            raise ValueError(f"the reward of seat {seat!r} is {value!r}; expected a finite number")
        self.rewards[seat] = float(value)

    def _partner(self, seat: str) -> _Seat:
        if seat not in self.seats:
            raise ValueError(f"there is no seat {seat!r}; the table has {', '.join(self._table.seats)}")
        return self.seats[seat]


class Table:
    """The seats of an environment's episodes."""

    def __init__(
        self, seats: Sequence[str] = ("other",), *, partner_seconds: float = 60.0, answer_seconds: float = 120.0
    ) -> None:
        """An episode waits `partner_seconds` for a partner in each of `seats`, and `answer_seconds` for each answer."""
        self.seats = tuple(seats)
        self.partner_seconds = partner_seconds
        self.answer_seconds = answer_seconds
        self._matchers = {seat: Matcher() for seat in self.seats}
        self._numbers = itertools.count()
        self._waiting_seats: dict[int, _Seat] = {}
        self._waiting_episodes: dict[tuple[str, int], asyncio.Future[_Seat]] = {}
        """The waiting episodes, by seat and episode."""
        self._connections: set[asyncio.Task[None]] = set()
        self._open = AsyncExitStack()

    async def open(self, context: EnvironmentContext) -> None:
        """Listens below the environment's directory. Raises `OSError` if another process does."""
        await asyncio.to_thread(context.directory.mkdir, parents=True, exist_ok=True)
        path = socket_path(context.directory.absolute(), SOCKET_NAME)
        lock = path.with_name(path.name + ".lock")
        complaint = f"cannot listen at {path}: another process hosts this environment (workers = 1 is all there can be)"
        self._open.callback(os.close, await asyncio.to_thread(take_lock, lock, complaint))
        server = await asyncio.start_unix_server(self._serve, path)
        self._open.callback(server.close)
        path.chmod(0o600)  # another user could sit at it

    async def close(self) -> None:
        """Ends all connections, and the listening."""
        await self._open.aclose()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @asynccontextmanager
    async def episode(self, example_index: int) -> AsyncIterator[Episode]:
        """Yields an episode once there is a partner in every seat; afterwards each partner gets its reward.

        Raises `NoPartner` if there is none within `partner_seconds`. Partners in an episode that ends with an exception get no
        reward, and their rollouts fail without being their environment's failure.
        """
        number, episode = next(self._numbers), Episode(self)
        loop = asyncio.get_running_loop()
        arriving: dict[str, asyncio.Future[_Seat]] = {seat: loop.create_future() for seat in self.seats}
        reason = "the episode was broken off"
        try:
            await self._gather(number, example_index, arriving, episode)
            for partner in episode.seats.values():
                await partner.connection.send(kind="seated", example=example_index)
            yield episode
            reason = "the host gave this seat no reward"
        except Exception as error:
            reason = clipped(f"the episode failed at its host: {type(error).__name__}: {error}", 1000)
            raise
        finally:
            for seat, arrival in arriving.items():
                self._waiting_episodes.pop((seat, number), None)
                self._matchers[seat].remove_episode(number, example_index)
                if arrival.done() and not arrival.cancelled():
                    rewarded = reason == "the host gave this seat no reward"
                    reward = episode.rewards.get(seat) if rewarded else None
                    arrival.result().connection.end(
                        kind="end", reward=reward, reason="" if reward is not None else reason
                    )

    async def _gather(
        self, number: int, example_index: int, arriving: dict[str, asyncio.Future[_Seat]], episode: Episode
    ) -> None:
        for seat, arrival in arriving.items():
            self._waiting_episodes[seat, number] = arrival
            self._seat_pairs(seat, self._matchers[seat].add_episode(number, example_index))
        try:
            async with asyncio.timeout(self.partner_seconds):
                for seat, arrival in arriving.items():
                    episode.seats[seat] = await arrival
        except TimeoutError:
            missing = ", ".join(repr(seat) for seat in self.seats if seat not in episode.seats)
            raise NoPartner(f"no partner in seat {missing} within partner_seconds = {self.partner_seconds:g}") from None

    def _seat_pairs(self, seat: str, pairs: Sequence[Pair]) -> None:
        for episode, waiting in pairs:
            arrival = self._waiting_episodes.pop((seat, episode))
            if arrival.done():  # its episode has just been cancelled, and the seat waits for another
                key = self._waiting_seats[waiting].key
                self._seat_pairs(seat, self._matchers[seat].add_seat(waiting, key))
            else:
                arrival.set_result(self._waiting_seats.pop(waiting))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reads what one seat says, until it ends. Runs in a task of its own."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        connection = Connection(reader, writer, "a seat")
        number, seat = next(self._numbers), None
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                seat = self._sat(connection, await connection.receive())
            self._waiting_seats[number] = seat
            self._seat_pairs(seat.name, self._matchers[seat.name].add_seat(number, seat.key))
            while True:
                self._hear(seat, await connection.receive())
        except (PartnerGone, TimeoutError) as error:
            self._lose(number, seat, str(error) or f"it said nothing within {HELLO_SECONDS:g} s")
        except asyncio.CancelledError:
            self._lose(number, seat, "the host's table was closed")
        finally:
            connection.end(kind="end", reward=None, reason=seat.gone if seat is not None else "this is no seat")
            try:
                await connection.closed()
            finally:
                self._connections.discard(task)

    def _sat(self, connection: Connection, hello: dict[str, Any]) -> _Seat:
        match hello:
            case {"kind": "sit", "protocol": 1, "seat": str(name), "key": int(key)} if name in self.seats:
                if len(self._connections) <= MAX_CONNECTIONS:
                    return _Seat(connection, name, key)
                reason = f"the table has {MAX_CONNECTIONS} connections, its most"
            case {"kind": "sit", "protocol": 1, "seat": str(name)}:
                reason = f"there is no seat {name[:64]!r}; the table has {', '.join(self.seats)}"
            case _:
                said = f"this message has {shown(hello.get('protocol'))}, or is none of it"
                reason = f"the host speaks version {PROTOCOL} of the seats' protocol, and {said}"
        connection.end(kind="end", reward=None, reason=reason)
        raise PartnerGone(reason)

    def _hear(self, seat: _Seat, message: dict[str, Any]) -> None:
        match message:
            case {"kind": "answer", "text": str(text)} if seat.answer is not None and not seat.answer.done():
                seat.answer.set_result(text)
            case {"kind": "answer"} if seat.owes:  # of an episode that is being broken off, as its end says
                seat.owes = False
            case {"kind": "leave", "reason": str(reason)}:
                raise PartnerGone(f"the partner in seat {seat.name!r} left: {reason[:1000]}")
            case _:
                raise PartnerGone(f"the partner in seat {seat.name!r} said {str(message.get('kind'))[:64]!r} unasked")

    def _lose(self, number: int, seat: _Seat | None, reason: str) -> None:
        """Takes note that a seat is gone, in whatever state it was."""
        if seat is None:
            logger.debug("a connection to the table ended: %s", reason)
            return
        seat.gone = reason
        if seat.answer is not None and not seat.answer.done():
            seat.answer.set_result(None)
        if self._waiting_seats.pop(number, None) is not None:
            self._matchers[seat.name].remove_seat(number, seat.key)
