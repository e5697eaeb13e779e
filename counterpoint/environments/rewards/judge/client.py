"""Asks an OpenAI-compatible server for one chat completion: bounded, repeated with patience, counted against a budget.

Everything that the server says is foreign data. The API key goes into one header and is struck out of whatever is quoted.
"""

from __future__ import annotations

import asyncio
import email.utils
import os
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any, TypeVar

import aiohttp
import orjson

from counterpoint.environments.rewards.judge.budget import Budget, Cost
from counterpoint.environments.rewards.judge.cache import JudgeAnswer
from counterpoint.environments.rewards.judge.config import JudgeConfig
from counterpoint.environments.rewards.judge.only_number import NoScore
from counterpoint.transport.files.untrusted import read_text
from counterpoint.transport.printable import printable, shortened

Scored = TypeVar("Scored")

MAX_ANSWER_BYTES = 2**20
LONGEST_WAIT = 120.0
"""Seconds between two requests. A server that asks for more is given up."""

_FIRST_WAIT = 1.0
_CONNECT_SECONDS = 10.0
_QUOTED_BYTES = 2048
_OVERHEAD_TOKENS = 64
"""Tokens that a chat template adds to each message."""
_MAX_KEY_BYTES = 16384
_MOST_TOKENS = 10**9
_LONGEST_MODEL = 200
_REPEATED = frozenset((408, 409, 425, 429))


_sleep = asyncio.sleep
"""Has a name of its own for tests that do not wait."""


class JudgeFailed(RuntimeError):
    """The judge gave no valid score; the message says what it did instead."""


class _Failure(Exception):
    def __init__(self, what: str, *, repeat: bool = True, wait: float | None = None, is_charged: bool = False) -> None:
        """`wait` is what the server asks for, in seconds; `is_charged`: it may have written an answer."""
        super().__init__(what)
        self.what, self.repeat, self.wait, self.is_charged = what, repeat, wait, is_charged


def read_key(config: JudgeConfig) -> str:
    """Returns the API key, or an empty text. Raises `ValueError` that names the variable or the file, never the key."""
    if config.api_key_variable is not None:
        key, where = os.environ.get(config.api_key_variable, ""), f"the variable {config.api_key_variable}"
    elif config.api_key_file is not None:
        where = f"the file {config.api_key_file.absolute()}"
        try:
            key = read_text(config.api_key_file, _MAX_KEY_BYTES)
        except OSError as error:
            raise ValueError(f"{where} cannot be read: {error.strerror}") from error
    else:
        return ""
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"{where} holds no API key; expected one word of printable ASCII characters")
    return key


class JudgeClient:
    """One judge of one process. The session opens at the first request."""

    def __init__(self, config: JudgeConfig) -> None:
        """Raises `ValueError` if the key cannot be read."""
        self._config = config
        self._key = read_key(config)
        self._url = f"{config.base_url}/chat/completions"
        self._slots = asyncio.Semaphore(config.concurrency)
        self._session: aiohttp.ClientSession | None = None
        self._open_again = 0.0
        """Moment of the monotonic clock before which the server asked for no request."""
        self._random = random.Random()

    async def ask(
        self,
        messages: Sequence[dict[str, str]],
        budget: Budget,
        score: Callable[[str], Awaitable[Scored]],
    ) -> tuple[JudgeAnswer, Scored]:
        """Returns the answer and what `score` makes of it; an answer of which it raises `NoScore` is asked for again.

        Raises `JudgeFailed` and `BudgetExhausted`.
        """
        config = self._config
        body = orjson.dumps(self.request(messages))
        failure = _Failure("")
        for attempt in range(config.retries + 1):
            try:
                answer = await self._paid(body, len(messages), budget)
                return answer, await score(answer.text)
            except NoScore as error:
                failure = _Failure(self._quoted(str(error)))
            except _Failure as error:
                failure = error
            if not failure.repeat or attempt == config.retries:
                break
            await self._pause(attempt, failure)
        times = f"after {attempt + 1} requests" if attempt else "to one request"
        raise JudgeFailed(f"{self._url} gave no score {times}: {failure.what}")

    def request(self, messages: Sequence[dict[str, str]]) -> dict[str, Any]:
        """Returns the body of a request."""
        config = self._config
        return {
            "model": config.model,
            "messages": list(messages),
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
            "stream": False,
        }

    async def close(self) -> None:
        """Closes the session."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _paid(self, body: bytes, messages: int, budget: Budget) -> JudgeAnswer:
        """Makes one request, paid for in advance."""
        # A token of text has at least one byte.
        most = budget.cost(1, len(body) + _OVERHEAD_TOKENS * messages, self._config.max_tokens)
        async with self._slots:
            await _sleep(max(0.0, self._open_again - time.monotonic()))
            await asyncio.to_thread(budget.pay, most)
            try:
                answer = await self._once(body)
            except _Failure as failure:
                if not failure.is_charged:
                    await asyncio.to_thread(budget.give_back, most - Cost(requests=1))
                raise
        if answer.prompt_tokens is not None and answer.completion_tokens is not None:
            actual = budget.cost(1, answer.prompt_tokens, answer.completion_tokens)
            await asyncio.to_thread(budget.give_back, most - actual)
        return answer

    async def _once(self, body: bytes) -> JudgeAnswer:
        seconds = self._config.timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                async with self._opened().post(self._url, data=body, allow_redirects=False) as response:
                    if response.status == HTTPStatus.OK:
                        return self._answer(await self._read(response))
                    raise self._refusal(response, await response.content.read(_QUOTED_BYTES))
        except TimeoutError:
            raise _Failure(f"no answer within timeout_seconds = {seconds:g}", is_charged=True) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            never_sent = isinstance(error, aiohttp.ClientConnectorError)
            raise _Failure(self._quoted(f"{type(error).__name__}: {error}"), is_charged=not never_sent) from None

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
            if self._key:
                headers["Authorization"] = f"Bearer {self._key}"
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._config.concurrency),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
                headers=headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # a small body may unfold to any size
            )
        return self._session

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise _Failure("the answer is compressed, which was not asked for", is_charged=True)
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > MAX_ANSWER_BYTES:
                response.close()
                raise _Failure(f"the answer has more than {MAX_ANSWER_BYTES} bytes", is_charged=True)
        return bytes(body)

    def _refusal(self, response: aiohttp.ClientResponse, body: bytes) -> _Failure:
        status = response.status
        wait = _retry_after(response.headers.get("Retry-After"))
        text = self._quoted(body.decode(errors="replace"))
        repeat = status in _REPEATED or status >= HTTPStatus.INTERNAL_SERVER_ERROR
        if wait is not None and wait > LONGEST_WAIT:
            return _Failure(f"status {status}, and it asks to wait {wait:g} s: {text}", repeat=False)
        return _Failure(f"status {status}: {text}", repeat=repeat, wait=wait)

    def _answer(self, body: bytes) -> JudgeAnswer:
        try:
            parsed = orjson.loads(body)
            choice = parsed["choices"][0]
            text = choice["message"]["content"]
            if not isinstance(text, str):
                raise TypeError(f"the content is {type(text).__name__}")
        except (orjson.JSONDecodeError, LookupError, TypeError) as error:
            raise _Failure(shortened(f"the answer is no chat completion: {error!r}", 200), is_charged=True) from None
        ended = choice.get("finish_reason")
        if ended == "length":
            raise _Failure(f"the answer was cut at max_tokens = {self._config.max_tokens}", is_charged=True)
        if ended not in ("stop", "eos_token", None):  # content_filter, for one: what stands there is no rating
            raise _Failure(self._quoted(f"the answer did not end by itself, but by {ended}"), is_charged=True)
        usage = parsed.get("usage")
        given, written = (_tokens(usage, name) for name in ("prompt_tokens", "completion_tokens"))
        said = [each for name in ("model", "system_fingerprint") if isinstance(each := parsed.get(name), str) and each]
        model = self._without_key(" ".join(said))[:_LONGEST_MODEL]
        return JudgeAnswer(self._without_key(text), given, written, model)

    async def _pause(self, attempt: int, failure: _Failure) -> None:
        wait = _FIRST_WAIT * 2**attempt * (0.5 + self._random.random())
        if failure.wait is not None:
            wait = max(failure.wait, 0.0)
            self._open_again = max(self._open_again, time.monotonic() + wait)
        await _sleep(min(wait, LONGEST_WAIT))

    def _quoted(self, text: str) -> str:
        return printable(shortened(self._without_key(text), 300)).replace("\n", " ")

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _retry_after(value: str | None) -> float | None:
    """Returns what a `Retry-After` header asks for, in seconds; None for one that asks for nothing that can be read."""
    if value is None:
        return None
    if value.isascii() and value.isdigit() and len(value) <= 9:
        return float(value)
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except (ValueError, TypeError, OverflowError):
        return None
    return max(0.0, moment.timestamp() - time.time())


def _tokens(usage: object, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int and 0 <= value <= _MOST_TOKENS else None
