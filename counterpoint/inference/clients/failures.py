"""The meaning of an answer other than 200: whether another attempt is useful, and the server's message."""

from __future__ import annotations

import json
from http import HTTPStatus

from counterpoint.inference.base import RequestRefused, ServerFailure, WeightsNotSeen
from counterpoint.transport.printable import clipped

ERROR_CHARACTERS = 500
"""Characters of a server's message in ours."""

ERROR_BYTES = 16 * ERROR_CHARACTERS
"""Bytes that are read of an error's body; the message may be inside JSON."""

RETRYABLE = frozenset(
    {
        HTTPStatus.UNAUTHORIZED,
        HTTPStatus.NOT_FOUND,
        HTTPStatus.REQUEST_TIMEOUT,
        HTTPStatus.CONFLICT,
        HTTPStatus.TOO_EARLY,
        HTTPStatus.TOO_MANY_REQUESTS,
    }
)
"""Client errors that may not come again later, or from another server: a server without the adapter answers 404,
and 401 while its token is replaced."""


NOTHING_LISTENS = "nothing listens there (connection refused)"
"""Why a server that still starts, or is gone, does not answer."""


def failure_of(url: str, status: int, body: bytes) -> RequestRefused | ServerFailure:
    """Returns the exception for a `status` other than 200, from up to `ERROR_BYTES` of its body."""
    message = f"{url} answered {status}: {_reason(body)}"
    if status == HTTPStatus.FAILED_DEPENDENCY:
        return WeightsNotSeen(message)
    refused = 400 <= status < 500 and status not in RETRYABLE
    return (RequestRefused if refused else ServerFailure)(message)


def _reason(body: bytes) -> str:
    """Returns the message of an error, whether ours (`error: text`), OpenAI's (`error: {message}`) or neither, cut to length."""
    text = body.decode(errors="replace")
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return clipped(text, ERROR_CHARACTERS)
    return clipped(str(error.get("message", error) if isinstance(error, dict) else error), ERROR_CHARACTERS)
