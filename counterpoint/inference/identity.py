"""The identity of a job's servers: a secret in a file, which the job makes, and which is proven without being shown.

A server proves it in its status, by an HMAC over its instance and a nonce of the client's. A pool of the job uses no server that
does not. A client proves it with each claim of weights, so that nobody else's orchestrator loads weights there.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from counterpoint.inference.token import read_token
from counterpoint.transport.files.atomic import write_atomically

VARIABLE = "COUNTERPOINT_IDENTITY_FILE"
"""The variable by which a server is told the path of the file."""

INSTANCE_VARIABLE = "COUNTERPOINT_INSTANCE"
"""The variable by which a server gets the id of its process from the one that starts it."""

STATUS_PATH = "/counterpoint/v1/status"
"""The path at which a server says what it serves, and with what weights."""

NONCE_BYTES = 16

_SECRET_BYTES = 32


def make(path: Path) -> None:
    """Writes a new secret, which only this user may read, unless the file is there. Raises `OSError`."""
    if not path.exists():
        write_atomically(path, f"{secrets.token_hex(_SECRET_BYTES)}\n".encode(), mode=0o600)


def read(path: str | os.PathLike[str] | None) -> bytes | None:
    """Returns the secret in the file; None without a file. Raises `ValueError`, naming the file."""
    return read_token(Path(path), "identity_file").encode() if path else None


def proof(secret: bytes, *stated: str) -> str:
    """Returns what only who has the secret can say of these texts, as hexadecimal digits."""
    return hmac.new(secret, "\0".join(stated).encode(), hashlib.sha256).hexdigest()


def is_proof(given: object, secret: bytes, *stated: str) -> bool:
    """Returns whether `given` is `proof` of these texts. Takes as long for any answer."""
    return type(given) is str and hmac.compare_digest(given.encode(), proof(secret, *stated).encode())
