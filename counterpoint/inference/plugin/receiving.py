"""Weights that a client sends: written to a directory of this process's own, and loaded from there.

`counterpoint/inference/sent_weights.py` has what is sent.

In shared memory if there is room, else in the temporary directory, while requests run. What comes incomplete is removed. They are
then loaded as any published directory. The base of what changed stays until another comes, so that it travels once.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from counterpoint.inference.checkpoint import BASE, read_manifest
from counterpoint.inference.plugin.socket_body import BoundedConnection, SocketBody
from counterpoint.inference.sent_weights import LENGTH_BYTES, MAX_OFFER_BYTES, WeightOffer
from counterpoint.transport.files.atomic import STABLE, write_buffers
from counterpoint.transport.files.own_directory import OwnDirectory, remove_left
from counterpoint.transport.files.shared_memory import SHARED_MEMORY, is_memory, lack_of_room

PREFIX = "counterpoint-received-"

SILENT_SECONDS = 30.0
"""How long a client may send nothing. Long, since it may wait for CPU time on a busy machine."""

ELEMENT_BYTES = 8
"""Most bytes that may come for each element of the served model: float32, and what changed, take fewer."""

LEAST_LIMIT = 1 << 26
"""Bytes that may come for any model: adapters of a tiny one may be larger than itself."""

_BYTES_A_WRITE = 1 << 22


class WeightReceiver:
    """Receives weights for the model in `model`, from several clients at once."""

    def __init__(self, model: Path) -> None:
        """Removes what killed servers of this user left."""
        for place in (SHARED_MEMORY, Path(tempfile.gettempdir())):
            remove_left(place, PREFIX)
        self._model = model
        self._limit: int | None = None
        self._coming = 0
        """Bytes of what is being received."""
        self._base: OwnDirectory | None = None
        self._held: dict[str, tuple[str, int]] = {}
        """Identity and bytes of each file in `_base`, by its path in a published directory."""

    async def consider(self, offer: WeightOffer) -> frozenset[str]:
        """Returns the files of an offer that need not come. Raises as `check`, of those that come."""
        held = self._held_of(offer)
        await asyncio.to_thread(self.check, replace(offer, left_out=held), self._coming)
        return held

    def check(self, offer: WeightOffer, coming: int) -> Path:
        """Returns the directory that has room for an offer beside `coming` bytes of others. Blocks on the disk.

        That of the base if the base need not come: only there it can be linked.

        Raises `ValueError` for what can never be taken, `OSError` if there is no room now.
        """
        if self._limit is None:
            elements = sum(math.prod(entry.shape) for entry in read_manifest(self._model).values())
            self._limit = max(LEAST_LIMIT, ELEMENT_BYTES * elements)
        if offer.nbytes > self._limit:
            raise ValueError(
                f"{offer.nbytes} bytes are offered; for the model being served {self._limit} are taken at most"
            )
        base = self._base
        places = (
            (SHARED_MEMORY, Path(tempfile.gettempdir())) if base is None or not offer.left_out else (base.path.parent,)
        )
        lacks = []
        for place in places:
            if not (lack := _lack_of_room(place, offer.nbytes + coming)):
                return place
            lacks.append(lack)
        raise OSError(errno.ENOSPC, f"there is no room for the weights: {'; '.join(lacks)}")

    async def receive(
        self, body: AsyncIterator[bytes], connection: BoundedConnection | None = None
    ) -> tuple[WeightOffer, OwnDirectory]:
        """Returns the offer and the directory of a body that has come whole, as a published directory.

        What follows the offer is taken from the socket of `connection`, which brings the body, if that can be done.

        Raises `ValueError` if it can never be taken; `OSError` if it cannot be now, also when it ends early or its client falls
        silent, which is no fault of the weights. Then nothing is left.
        """
        reader = _Reader(body)
        length = int.from_bytes(await reader.read(LENGTH_BYTES), "little")
        if length > MAX_OFFER_BYTES:
            raise ValueError(f"an offer of {length} bytes comes; at most {MAX_OFFER_BYTES} are read")
        offer = WeightOffer.decode(await reader.read(length))

        async def write(directory: Path) -> None:
            for name, nbytes in offer.coming.items():
                await _write(reader, directory / name, nbytes)
            if await reader.some(1):
                raise ValueError("more bytes come than were offered")

        async def move(directory: Path) -> None:
            assert connection is not None
            came, rest = connection.take()
            with SocketBody(reader.rest + came, rest, SILENT_SECONDS) as moving:
                for name, nbytes in offer.coming.items():
                    await moving.write(directory / name, nbytes)

        is_whole = connection is not None and connection.body_bytes == LENGTH_BYTES + length + offer.nbytes
        return offer, await self._take(offer, move if is_whole else write)

    async def _take(self, offer: WeightOffer, fill: Callable[[Path], Awaitable[None]]) -> OwnDirectory:
        """Makes a directory, which `fill` gives the files of an offer that come.

        Raises as `check` and `fill`, and nothing is left.
        """
        others, own = self._coming, None
        self._coming += offer.nbytes  # before the check, so that whoever comes meanwhile is counted with it
        try:
            place = await asyncio.to_thread(self.check, offer, others)
            own = await asyncio.to_thread(OwnDirectory, place, PREFIX)
            (own.path / BASE).mkdir()
            self._link_held(offer, own.path)
            await fill(own.path)
            (own.path / STABLE).touch()
            await self._hold_base(offer, own.path)
        except BaseException:
            if own is not None:
                await asyncio.to_thread(own.remove)
            raise
        finally:
            self._coming -= offer.nbytes
        return own

    def _held_of(self, offer: WeightOffer) -> frozenset[str]:
        return frozenset(
            name for name, identity in offer.identities.items() if self._held.get(name) == (identity, offer.files[name])
        )

    def _link_held(self, offer: WeightOffer, directory: Path) -> None:
        if lost := offer.left_out - self._held_of(offer):
            raise OSError(errno.ESTALE, f"{sorted(lost)[0]} does not come, and another base has taken its place here")
        for name in offer.left_out:
            assert self._base is not None
            os.link(self._base.path / name, directory / name)

    async def _hold_base(self, offer: WeightOffer, directory: Path) -> None:
        """Keeps the base of what has come in place of an earlier one; of whole weights there is none to keep."""
        if offer.adapter is not None or (offer.identities and offer.left_out == offer.identities.keys()):
            return
        former, self._base, self._held = self._base, None, {}
        if offer.identities:
            base = await asyncio.to_thread(OwnDirectory, directory.parent, PREFIX)
            (base.path / BASE).mkdir()
            for name in offer.identities:
                os.link(directory / name, base.path / name)
            self._base = base
            self._held = {name: (identity, offer.files[name]) for name, identity in offer.identities.items()}
        if former is not None:
            await asyncio.to_thread(former.remove)


class _Reader:
    """Reads a body that comes in pieces of any size."""

    def __init__(self, body: AsyncIterator[bytes]) -> None:
        self._body = body
        self._rest = memoryview(b"")

    @property
    def rest(self) -> bytes:
        """What was handed on and not read."""
        return bytes(self._rest)

    async def some(self, most: int) -> memoryview:
        """Returns the next bytes, 1 to `most`; none at the end of the body. Raises `TimeoutError` when it is silent."""
        while not self._rest:
            try:
                async with asyncio.timeout(SILENT_SECONDS):
                    self._rest = memoryview(await anext(self._body))
            except StopAsyncIteration:
                break
            except TimeoutError:
                raise TimeoutError(f"the client sent nothing for {SILENT_SECONDS:g} s") from None
        piece, self._rest = self._rest[:most], self._rest[most:]
        return piece

    async def read(self, nbytes: int) -> bytes:
        """Returns the next `nbytes`. Raises `ConnectionAbortedError` if there are fewer."""
        pieces: list[memoryview] = []
        while nbytes:
            pieces.append(await self.some(nbytes))
            if not pieces[-1]:
                raise ConnectionAbortedError(f"the body ends {nbytes} bytes early")
            nbytes -= len(pieces[-1])
        return b"".join(pieces)


async def _write(reader: _Reader, path: Path, nbytes: int) -> None:
    """Writes the next `nbytes` of a body to a new file, in a thread, a few megabytes at a time."""
    await asyncio.to_thread(_append, path, [])
    while nbytes:
        pieces: list[memoryview] = []
        held = 0
        while held < min(nbytes, _BYTES_A_WRITE):
            pieces.append(await reader.some(nbytes - held))
            if not pieces[-1]:
                raise ConnectionAbortedError(f"the body ends {nbytes - held} bytes before the end of {path.name}")
            held += len(pieces[-1])
        await asyncio.to_thread(_append, path, pieces)
        nbytes -= held


def _lack_of_room(place: Path, nbytes: int) -> str:
    """Returns why `nbytes` should not be written in a directory; empty if they may. Blocks on the disk."""
    if place == SHARED_MEMORY or is_memory(place):
        return lack_of_room(nbytes, place)
    about = os.statvfs(place)
    free = about.f_bavail * about.f_frsize
    return f"{free} bytes are free in {place}" if free < nbytes else ""


def _append(path: Path, pieces: list[memoryview]) -> None:
    with path.open("ab", buffering=0) as file:
        write_buffers(file.fileno(), pieces)
