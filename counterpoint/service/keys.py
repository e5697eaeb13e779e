"""Who may use the service: the clients' keys. The process keeps only digests of them, so that no log or dump shows a key."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from counterpoint.service.config import TinkerConfig
from counterpoint.transport.config import IDENTIFIER_PATTERN
from counterpoint.transport.errors import UserError
from counterpoint.transport.loopback import is_loopback

KEY_PREFIX, SHORTEST_KEY = "tml-", 20

_EXPECTED = (
    f"expected {KEY_PREFIX!r} and at least {SHORTEST_KEY - len(KEY_PREFIX)} more characters a line, and a name after it"
)


def check_access(config: TinkerConfig) -> dict[bytes, str]:
    """Returns the digests of the accepted keys, with their names, or none on loopback without a file of keys.

    Raises `UserError`, also for quotas of a name that no key has.
    """
    if config.keys_file is None and not is_loopback(config.host):
        raise UserError(
            f"tinker.host = {config.host!r} is reached from other machines, and tinker.keys_file is not set: anybody could train "
            "and sample; set it, or listen at 127.0.0.1"
        )
    keys = keys_of(config.keys_file)
    names = {owner_name(key.hex(), name) for key, name in keys.items()} or {owner_name("")}
    if unknown := sorted(set(config.quotas) - names):
        raise UserError(
            f"tinker.quotas.{unknown[0]}: no key has this name; expected one of {', '.join(sorted(names))}: a name stands after "
            "its key in tinker.keys_file"
        )
    return keys


def owner_name(owner: str, name: str = "") -> str:
    """Returns the name of a key's owner, from the hexadecimal digest. It reveals nothing of the key."""
    return name or (f"key-{owner[:8]}" if owner else "local")


def keys_of(path: Path | None) -> dict[bytes, str]:
    """Returns the digests of the keys in a file, with their names, or empty ones. None without a file. Raises `UserError`."""
    if path is None:
        return {}
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"tinker.keys_file = {str(path)!r}: {said}; {_EXPECTED}") from None
    entries = [line.split() for line in lines if line and not line.startswith("#")]
    keys = [entry[0] for entry in entries]
    bad = [number for number, key in enumerate(keys, 1) if not key.startswith(KEY_PREFIX) or len(key) < SHORTEST_KEY]
    if bad or not keys:
        said = f"key {bad[0]} is none" if bad else "it has no key"
        raise UserError(f"tinker.keys_file = {str(path)!r}: {said}; {_EXPECTED}")
    names = [entry[1] for entry in entries if len(entry) > 1]
    if (
        any(len(entry) > 2 for entry in entries)
        or not all(re.fullmatch(IDENTIFIER_PATTERN, name) for name in names)
        or len(set(names)) < len(names)
    ):
        raise UserError(
            f"tinker.keys_file = {str(path)!r}: after a key there may be a name, {IDENTIFIER_PATTERN}, that no other key has"
        )
    return {digest(entry[0]): entry[1] if len(entry) > 1 else "" for entry in entries}


def digest(key: str) -> bytes:
    """Returns the digest of a key."""
    return hashlib.sha256(key.encode(errors="replace")).digest()
