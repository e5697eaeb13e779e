"""The bearer token between client and server, which is needed beyond loopback."""

from __future__ import annotations

from pathlib import Path

MAX_TOKEN_BYTES = 4096


def read_token(path: Path, key: str = "api_key_file") -> str:
    """Returns the token in `path`, without surrounding white space. `key` is the one that names it.

    Raises `ValueError`, naming the absolute path and never the token.
    """
    path = path.absolute()
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TOKEN_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{key} = {str(path)!r}: cannot be read: {error.strerror}") from error
    token = content.strip()
    if not token or len(content) > MAX_TOKEN_BYTES or not token.isascii() or b"\n" in token:
        raise ValueError(f"{key} = {str(path)!r}: one line of 1 to {MAX_TOKEN_BYTES} ASCII characters is expected")
    return token.decode()
