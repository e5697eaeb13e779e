"""The bearer token between client and server, which is needed beyond loopback.

A file of tokens has one a line. A server takes any of them, and a client sends the first, so that a token can be replaced without
a moment at which the two ends differ.
"""

from __future__ import annotations

from pathlib import Path

from counterpoint.transport.files.watched import Watched

MAX_TOKEN_BYTES = 4096

MAX_TOKENS = 8
"""Lines of a file."""

API_KEY_FILE_VARIABLE = "COUNTERPOINT_API_KEY_FILE"
"""Environment variable with which our server names the file to its plugin."""


def read_tokens(path: Path, key: str = "api_key_file") -> tuple[str, ...]:
    """Returns the tokens in `path`, without surrounding white space. `key` is the one that names it.

    Raises `ValueError`, naming the file and never a token.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TOKENS * (MAX_TOKEN_BYTES + 1) + 1)
    except OSError as error:
        raise ValueError(f"{key} = {str(path.absolute())!r}: cannot be read: {error.strerror}") from error
    tokens = [line.strip() for line in content.strip().split(b"\n")]
    wrong = [each for each in tokens if not each or len(each) > MAX_TOKEN_BYTES or not each.isascii()]
    if wrong or len(tokens) > MAX_TOKENS:
        raise ValueError(
            f"{key} = {str(path.absolute())!r}: one token a line is expected, 1 to {MAX_TOKENS} of them, each of 1 to "
            f"{MAX_TOKEN_BYTES} ASCII characters"
        )
    return tuple(each.decode() for each in tokens)


def read_token(path: Path, key: str) -> str:
    """Returns the only token in `path`. Raises `ValueError`, also if there are several."""
    tokens = read_tokens(path, key)
    if len(tokens) > 1:
        raise ValueError(f"{key} = {str(path.absolute())!r}: one line is expected, and there are {len(tokens)}")
    return tokens[0]


def watched_tokens(path: Path) -> Watched[tuple[str, ...]]:
    """Returns the tokens in `path`, to be read again once they change. Raises as `read_tokens`."""
    return Watched(f"the token in {path.absolute()}", lambda: read_tokens(path))
