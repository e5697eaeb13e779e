"""Who may read and who may change: two bearer tokens, each in a file that only its owner may read.

A file is made, with a new token, where there is none. A file that others may read is refused: its token may be known by now.

`RateLimit` says how often a client may ask: a token bucket for each address, in memory that is bounded however many there are.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.untrusted import UntrustedFileError, open_regular
from counterpoint.transport.http.requests import bearer_token

Access = Literal["read", "change"]

MAX_TOKEN_BYTES = 4096
"""The size of a token's file."""

_TOKEN = re.compile(rb"[A-Za-z0-9._~+/=-]{20,512}")
"""RFC 6750, of a length that cannot be guessed."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The digests of both tokens. The tokens themselves are not kept, so no log or dump can show them."""

    admin: bytes
    read: bytes

    def access_of(self, header: str | None) -> Access | None:
        """Returns what the bearer of an `Authorization` header may do; None for nothing. Takes as long for any wrong token."""
        given = _digest(bearer_token(header).encode(errors="replace"))
        is_admin, is_reader = hmac.compare_digest(given, self.admin), hmac.compare_digest(given, self.read)
        if not (is_admin or is_reader):
            return None
        return "change" if is_admin else "read"


def load_tokens(admin_file: Path, read_file: Path) -> Tokens:
    """Reads both tokens; makes a file that is missing.

    Raises `UserError` for a file that others may read, that holds no token, or that cannot be made.
    """
    found: Mapping[Path, bytes] = {path: _load(path) for path in (admin_file, read_file)}
    if len(found) < 2 or found[admin_file] == found[read_file]:
        raise UserError(
            f"{admin_file} and {read_file} hold the same token: who may read could change everything; "
            f"remove {read_file} to have another one made"
        )
    return Tokens(admin=_digest(found[admin_file]), read=_digest(found[read_file]))


def _load(path: Path) -> bytes:
    try:
        _make(path)
        with open_regular(path) as file:
            status, content = os.fstat(file.fileno()), file.read(MAX_TOKEN_BYTES + 1).strip()
    except UntrustedFileError as error:
        raise UserError(f"token file {error}") from None
    except OSError as error:
        raise UserError(f"token file {path}: {error.strerror}; write a token there, or name another file") from None
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(
            f"token file {path} has the mode {stat.S_IMODE(status.st_mode):04o}, so other users may know the token; expected "
            f"0600: remove the file to have a new one made"
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise UserError(f"token file {path} belongs to user {status.st_uid}; expected ours, {os.geteuid()}")
    if not _TOKEN.fullmatch(content):
        raise UserError(f"token file {path} holds no token: expected 20 to 512 letters, digits or -._~+/=")
    return content


def _make(path: Path) -> None:
    """Writes a new token, unless there is a file: whole or not at all, and never in place of another's."""
    if path.is_symlink() or path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):  # another process has just made it
        write_atomically(path, secrets.token_urlsafe(32).encode() + b"\n", mode=0o600, new=True)


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


MOST_CLIENTS = 4096
"""Addresses that are remembered; the one that was silent longest is forgotten, and begins anew."""


class RateLimit:
    """Lets each client ask `rate` times a second on average, and `burst` times at once."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, max(1.0, burst), clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """What each client has left, and when."""

    def take(self, address: str) -> float:
        """Counts a request; returns 0, or the seconds after which the client may ask again if this one is too much."""
        now, client = self._clock(), _client_of(address)
        left, since = self._left.pop(client, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._rate)
        is_allowed = left >= 1
        self._left[client] = (left - 1 if is_allowed else left), now
        if len(self._left) > MOST_CLIENTS:
            self._left.popitem(last=False)
        return 0.0 if is_allowed else (1 - left) / self._rate

    def __len__(self) -> int:
        """How many clients are remembered."""
        return len(self._left)


def _client_of(address: str) -> str:
    """Returns what counts as one client: an IPv4 address, or a network of 64 bits, which one machine may own, of IPv6."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]
    return str(parsed) if parsed.version == 4 else str(ipaddress.ip_network((parsed, 64), strict=False))
