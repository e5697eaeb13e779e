"""Sends bytes to an HTTP server as they are, and reads the statuses of its answers."""

from __future__ import annotations

import asyncio

ANSWER_SECONDS = 60.0


class RawClient:
    """One connection at a time to `port` of loopback; another is opened when the server has closed the last."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, content: bytes) -> int:
        """Sends one whole request and returns the status of its answer; 0 if the server closed the connection without one.

        Raises `TimeoutError` after `ANSWER_SECONDS`.
        """
        async with asyncio.timeout(ANSWER_SECONDS):
            for is_fresh in (self._streams is None, True):
                reader, writer = self._streams = self._streams or await self._connect()
                try:
                    writer.write(content)
                    status, closes = await _answer(reader)
                except (ConnectionError, asyncio.IncompleteReadError):
                    await self.close()
                    if is_fresh:
                        return 0
                    continue  # it was closed before, while nothing was asked
                if closes:
                    await self.close()
                return status
        raise AssertionError("unreachable")

    async def ask_alone(self, content: bytes) -> set[int]:
        """Sends the bytes over a connection of their own, ends its sending half, and returns the statuses of all answers."""
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await self._connect()
            found: set[int] = set()
            try:
                writer.write(content)
                await writer.drain()
                writer.write_eof()
                while True:
                    found.add((await _answer(reader))[0])
            except (ConnectionError, asyncio.IncompleteReadError, ValueError):
                return found
            finally:
                writer.close()
                await _closed(writer)

    async def close(self) -> None:
        """Closes the connection, if there is one."""
        if self._streams is not None:
            writer, self._streams = self._streams[1], None
            writer.close()
            await _closed(writer)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._port)


async def _closed(writer: asyncio.StreamWriter) -> None:
    try:
        await writer.wait_closed()
    except ConnectionError:
        return


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Reads one answer. Returns its status, and whether the server closes the connection after it."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head.split(b" ", 2)[1])
    if b"transfer-encoding: chunked" in head:
        while size := int((await reader.readline()).strip() or b"0", 16):
            await reader.readexactly(size + 2)
        await reader.readline()
    elif b"content-length: " in head:
        await reader.readexactly(int(head.split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0]))
    return status, b"connection: close" in head
