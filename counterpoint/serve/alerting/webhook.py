"""Posts a message to a webhook: over TLS, within a deadline, and to no other address than the one that was configured."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

DEADLINE_SECONDS = 10.0
"""The deadline of one whole request: name, connection, sending and answer."""

LONGEST_PAUSE_SECONDS = 60.0

_WORTH_ANOTHER = frozenset({408, 425, 429})
"""Status codes after which a retry may succeed; so may all from 500 on."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request."""

    taken: bool
    reason: str = ""
    """Why it was not; it holds neither the address nor what the other end sent."""
    final: bool = False
    """Whether the same request would be refused again."""
    pause_seconds: float = 0.0
    """How long the other end asks us to wait."""


class _NotAwaited(ThreadPoolExecutor):
    """Looks up the name. A lookup cannot be cancelled, and a loop ends only after its executor: it may take half a minute."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leaves what still runs to itself."""
        super().shutdown(wait=False, cancel_futures=True)


class Webhook:
    """One address."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """`context` verifies the other end; unset, by the machine's authorities."""
        self._url = url
        self._headers = dict(headers or {})
        self._deadline_seconds = deadline_seconds
        self._context = context

    def __str__(self) -> str:
        """The address without its path, which may be a secret."""
        parts = urlsplit(self._url)
        return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")

    def post(self, body: Mapping[str, Any]) -> Answer:
        """Sends a message, and waits for the answer."""
        return asyncio.run(self._post(body))

    async def _post(self, body: Mapping[str, Any]) -> Answer:
        timeout = aiohttp.ClientTimeout(total=self._deadline_seconds)
        asyncio.get_running_loop().set_default_executor(_NotAwaited(1))
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=self._headers) as session,
                session.post(
                    self._url, json=body, allow_redirects=False, ssl=True if self._context is None else self._context
                ) as answer,
            ):
                return _read(answer.status, answer.headers.get("Retry-After", ""))
        except TimeoutError:
            return Answer(False, f"it did not answer within {self._deadline_seconds:g} s")
        except aiohttp.ClientConnectorCertificateError:
            return Answer(False, "its certificate is not valid for it")
        except aiohttp.ClientConnectorError as error:
            return Answer(False, f"no connection: {error.os_error.strerror or type(error.os_error).__name__}")
        except (aiohttp.ClientError, OSError, ValueError) as error:  # its text may have the address
            return Answer(False, f"the request failed ({type(error).__name__})")


def _read(status: int, retry_after: str) -> Answer:
    if 200 <= status < 300:
        return Answer(True)
    if 300 <= status < 400:
        return Answer(False, f"it answered with {status}, and redirects are not followed", final=True)
    pause = float(retry_after) if retry_after.isascii() and retry_after.isdigit() and len(retry_after) < 6 else 0.0
    final = status < 500 and status not in _WORTH_ANOTHER
    return Answer(False, f"it answered with {status}", final, min(pause, LONGEST_PAUSE_SECONDS))
