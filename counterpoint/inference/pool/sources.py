"""The sources of a pool's servers: fixed addresses, a name that resolves to many, and watched files.

`pool` reads them regularly, and adds and removes servers accordingly. A source that cannot be read (a name server that does not
answer, a missing file) changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from counterpoint.inference.config import PoolConfig, check_url
from counterpoint.transport.loopback import is_loopback

logger = logging.getLogger(__name__)

RESOLVE_SECONDS = 5.0
"""Deadline of one look-up of the name."""

MAX_FILE_BYTES = 1 << 20
"""A longer file of addresses is refused."""

OPERATOR_FILE = "operator_servers.txt"
"""The file of the servers that its operator has drained or added (`counterpoint/job/admin/servers.py`), in a job's directory."""

_reader = ThreadPoolExecutor(max_workers=4, thread_name_prefix="servers")
"""Reads the files. The threads of `asyncio.to_thread` are the environments', and all of them may hang."""

_warned_of: set[Path] = set()
"""Keys that a warning has named."""

WISHED = "its operator has drained it"

Listing = dict[str, str]
"""Maps the base URL of each listed server to the reason to drain it, which is empty if it stays."""


class Sources:
    """The servers named by `config.urls`, `config.dns` and `config.urls_file` together.

    `operator_file`, if there is such a file, goes before them all.
    """

    def __init__(self, config: PoolConfig, operator_file: Path | None = None) -> None:
        self._config = config
        self._operator_file = operator_file
        self._fixed: Listing = dict.fromkeys(config.urls, "")
        self._resolved: Listing = {}
        self._listed: Listing = {}
        self._wished: Listing = {}
        """The servers that the operator has drained or added."""
        self._reported: dict[str, str] = {}
        """The last error of each source, so that the log has it once."""
        self._texts: dict[Path, bytes] = {}
        """The last contents of each file."""

    @property
    def changes(self) -> bool:
        """Whether any source may change."""
        return any(each is not None for each in (self._config.dns, self._config.urls_file, self._operator_file))

    def is_configured(self, url: str) -> bool:
        """Returns whether the configuration names a server, not only the operator."""
        return any(url in listing for listing in (self._fixed, self._resolved, self._listed))

    async def read(self) -> Listing:
        """Returns the listed servers. A line of the file overrides the other sources on draining."""
        if self._config.dns is not None:
            await self._resolve(self._config.dns)
        if self._config.urls_file is not None:
            self._listed = await self._read_file("urls_file", self._config.urls_file, self._listed)
        if self._operator_file is not None:
            self._wished = await self._read_file(OPERATOR_FILE, self._operator_file, self._wished, wished=True)
        listing = self._fixed | self._resolved | self._listed | self._wished
        if self._config.api_key_file is not None:
            _warn_of_plain(self._config.api_key_file, listing)
        return listing

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

    async def _read_file(self, source: str, path: Path, known: Listing, *, wished: bool = False) -> Listing:
        """Returns the servers in the file, or `known` if nothing in it is new. The operator's, `wished`, may be missing."""
        try:
            text = await asyncio.get_running_loop().run_in_executor(_reader, read_text, path)
            if text == self._texts.get(path):
                return known
            listing, mistakes = parse_listing(text.decode(), *[WISHED] * wished)
        except FileNotFoundError as error:
            if wished:
                self._texts.pop(path, None)
                return {}
            self._report(source, f"{source} = {str(path)!r}: {error}")
            return known
        except (OSError, ValueError) as error:
            self._report(source, f"{source} = {str(path)!r}: {error}")
            return known
        self._texts[path] = text
        self._report(source, "".join(f"{path}:{number}: {mistake}; " for number, mistake in mistakes)[:-2])
        # A line with a mistake may be that of a known server: while there is one, no server is dropped.
        return known | listing if mistakes else listing

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


def _warn_of_plain(api_key_file: Path, urls: Iterable[str]) -> None:
    """Logs, once a process for each key, that it goes to another machine unencrypted."""
    plain = [url for url in urls if url.startswith("http://") and not is_loopback(urlsplit(url).hostname or "")]
    if plain and api_key_file not in _warned_of:
        _warned_of.add(api_key_file)
        logger.warning(
            "api_key_file = %r: its key is sent to %s unencrypted, so whoever is on the way reads and may use it; give the "
            "servers certificates and name them by https:// (docs/inference.md), unless the network itself is encrypted",
            str(api_key_file),
            plain[0] + (f" and {len(plain) - 1} other servers" if plain[1:] else ""),
        )


def read_text(path: Path) -> bytes:
    """Returns the bytes of a file of addresses. Raises `OSError`, and `ValueError` for a long one."""
    with path.open("rb") as file:
        text = file.read(MAX_FILE_BYTES + 1)
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
    return text


def _url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def parse_listing(
    text: str, drained: str = "its line in urls_file begins with drain"
) -> tuple[Listing, list[tuple[int, str]]]:
    """Returns the servers in `text`, and its mistakes as line number and sentence. `drained` is the reason of those to drain.

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
            listing[url] = drained if drain else ""
    return listing, mistakes
