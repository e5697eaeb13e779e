"""The sources of a pool's servers: fixed addresses, a name that resolves to many, a file that is watched.

`pool` reads them regularly, and adds and removes servers accordingly. A source that cannot be read (a name server that does
not answer, a missing file) changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from urllib.parse import urlsplit

from inference.config import PoolConfig, check_url

logger = logging.getLogger(__name__)

RESOLVE_SECONDS = 5.0
"""Deadline of one look-up of the name."""

MAX_FILE_BYTES = 1 << 20
"""A longer file of addresses is refused."""

Listing = dict[str, str]
"""By base URL of every listed server, why it is to be drained; empty if it is not."""


class Sources:
    """The servers named by `config.urls`, `config.dns` and `config.urls_file` together."""

    def __init__(self, config: PoolConfig) -> None:
        self._config = config
        self._fixed: Listing = {url.rstrip("/"): "" for url in config.urls}
        self._resolved: Listing = {}
        self._listed: Listing = {}
        self._reported: dict[str, str] = {}
        """The last error that was logged of each source: each is logged once."""
        self._text: bytes | None = None

    @property
    def changes(self) -> bool:
        """Whether any source may change."""
        return self._config.dns is not None or self._config.urls_file is not None

    async def read(self) -> Listing:
        """Returns the listed servers. A line of the file overrides the other sources on draining."""
        if self._config.dns is not None:
            await self._resolve(self._config.dns)
        if self._config.urls_file is not None:
            await self._read_file(self._config.urls_file)
        return self._fixed | self._resolved | self._listed

    async def _resolve(self, name: str) -> None:
        parts = urlsplit(name)
        try:
            async with asyncio.timeout(RESOLVE_SECONDS):
                found = await asyncio.get_running_loop().getaddrinfo(
                    parts.hostname, parts.port or 80, type=socket.SOCK_STREAM
                )
        except TimeoutError:
            self._report("dns", f"{name} was not resolved within {RESOLVE_SECONDS:g} s")
        except (OSError, UnicodeError) as error:
            self._report("dns", f"{name} cannot be resolved: {error}")
        else:
            self._report("dns", "")
            self._resolved = {_url(str(address[0]), int(address[1])): "" for *_, address in sorted(found)}

    async def _read_file(self, path: Path) -> None:
        try:
            text = await asyncio.to_thread(_read_text, path)
            if text == self._text:
                return
            listing, mistakes = parse_listing(text.decode())
        except (OSError, ValueError) as error:
            self._report("urls_file", f"urls_file = {str(path)!r}: {error}")
            return
        # A line with a mistake may be that of a known server: while there is one, no server is dropped.
        self._listed = self._listed | listing if mistakes else listing
        self._text = text
        self._report("urls_file", "".join(f"{path}:{number}: {mistake}; " for number, mistake in mistakes)[:-2])

    def _report(self, source: str, complaint: str) -> None:
        if complaint and complaint != self._reported.get(source):
            logger.error("Inference servers: %s; what was known before, and all else, counts", complaint)
        elif not complaint and self._reported.get(source):
            logger.info("Inference servers: %s can be read again", source)
        self._reported[source] = complaint

    def describe(self) -> str:
        """Describes the sources and their errors, for a person."""
        named = [*self._fixed, *(str(source) for source in (self._config.dns, self._config.urls_file) if source)]
        return "; ".join([", ".join(named), *filter(None, self._reported.values())])


def _read_text(path: Path) -> bytes:
    with path.open("rb") as file:
        text = file.read(MAX_FILE_BYTES + 1)
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
    return text


def _url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def parse_listing(text: str) -> tuple[Listing, list[tuple[int, str]]]:
    """Returns the servers in `text`, and its mistakes as line number and sentence.

    A line holds a base URL, or `drain` and a base URL: a server that completes its requests and gets no new ones. A comment
    begins with `#`.
    """
    listing: Listing = {}
    mistakes: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        drain = words[0] == "drain"
        try:
            if len(words) != 1 + drain:
                raise ValueError(f"{line.strip()!r}: one URL is expected, or `drain` and one URL")
            url = check_url(words[-1])
        except ValueError as error:
            mistakes.append((number, str(error)))
        else:
            listing[url] = "its line in urls_file begins with drain" if drain else ""
    return listing, mistakes
