"""Who may use the service: the clients' keys, of which the process keeps digests alone, so that no log or dump shows one."""

from __future__ import annotations

import hashlib
from pathlib import Path

from counterpoint.service.config import TinkerConfig
from counterpoint.transport.errors import UserError
from counterpoint.transport.loopback import is_loopback

KEY_PREFIX, SHORTEST_KEY = "tml-", 20


def check_access(config: TinkerConfig) -> frozenset[bytes]:
    """Returns the digests of the keys that are taken; none on loopback without a file of keys. Raises `UserError`."""
    if config.keys_file is None and not is_loopback(config.host):
        raise UserError(
            f"tinker.host = {config.host!r} is reached from other machines, and tinker.keys_file is not set: anybody could train "
            "and sample; set it, or listen at 127.0.0.1"
        )
    return keys_of(config.keys_file)


def keys_of(path: Path | None) -> frozenset[bytes]:
    """Returns the digests of the keys in a file; none without a file. Raises `UserError`."""
    if path is None:
        return frozenset()
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"tinker.keys_file = {str(path)!r}: {error}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    bad = [number for number, key in enumerate(keys, 1) if not key.startswith(KEY_PREFIX) or len(key) < SHORTEST_KEY]
    if bad or not keys:
        said = f"key {bad[0]} is none" if bad else "it has no key"
        raise UserError(
            f"tinker.keys_file = {str(path)!r}: {said}; expected {KEY_PREFIX!r} and at least "
            f"{SHORTEST_KEY - len(KEY_PREFIX)} more characters a line"
        )
    return frozenset(digest(key) for key in keys)


def digest(key: str) -> bytes:
    """Returns what is kept of a key."""
    return hashlib.sha256(key.encode(errors="replace")).digest()
