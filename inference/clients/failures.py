"""What an answer other than 200 means: whether it is worth another attempt, and the server's own words on it."""

from __future__ import annotations

import json
from http import HTTPStatus

from inference.base import RequestRefused, ServerFailure

ERROR_CHARACTERS = 500
"""Of a server's own words in our messages."""

ERROR_BYTES = 16 * ERROR_CHARACTERS
"""Read of the body of an error; the words may stand in JSON."""

RETRYABLE = frozenset(
    {
        HTTPStatus.NOT_FOUND,
        HTTPStatus.REQUEST_TIMEOUT,
        HTTPStatus.CONFLICT,
        HTTPStatus.TOO_EARLY,
        HTTPStatus.TOO_MANY_REQUESTS,
    }
)
"""Client errors that another server, or a later moment, may not answer: a server without the adapter says 404."""


def failure_of(url: str, status: int, body: bytes) -> RequestRefused | ServerFailure:
    """The exception for a `status` other than 200, from up to `ERROR_BYTES` of its body."""
    refused = 400 <= status < 500 and status not in RETRYABLE
    return (RequestRefused if refused else ServerFailure)(f"{url} answered {status}: {_reason(body)}")


def _reason(body: bytes) -> str:
    """The message of an error, whether ours (`error: text`), OpenAI's (`error: {message}`) or neither, and never much of it."""
    text = body.decode(errors="replace")
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return text[:ERROR_CHARACTERS]
    return str(error.get("message", error) if isinstance(error, dict) else error)[:ERROR_CHARACTERS]
