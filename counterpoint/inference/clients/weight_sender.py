"""Sends the files of a version to a server, in a thread: the bytes go from file to socket without the event loop.

A thread of its own reads a quarter of a megabyte and writes it, both without the GIL. Silence of the server ends it, and so does
the caller's cancellation, which shuts the socket down.
"""

from __future__ import annotations

import asyncio
import errno
import http.client
import logging
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack, suppress
from dataclasses import replace
from http import HTTPStatus
from io import FileIO
from urllib.parse import urlsplit

import orjson

from counterpoint.inference.base import InferenceError, RequestRefused, ServerFailure, ServerUnreachable, WeightUpdate
from counterpoint.inference.clients.failures import ERROR_BYTES, failure_of
from counterpoint.inference.clients.lost_peers import notice_loss
from counterpoint.inference.loads import LoadClaim
from counterpoint.inference.sent_weights import OFFER_PATH, SEND_PATH, WeightOffer, opened
from counterpoint.transport.process.permanent_errors import is_permanent

logger = logging.getLogger(__name__)

SILENT_SECONDS = 30.0
"""How long a server may take for a piece. Long, since it may wait for CPU time on a busy machine."""

PIECE_BYTES = 1 << 18
"""Bytes read and written at once. The deadline of a write holds for all of them, so a slow link needs small ones."""

MAX_ANSWER_BYTES = 1 << 24
"""Longest answer: a digest of each layer."""


class WeightSender:
    """Sends versions to the server at `url`."""

    def __init__(
        self,
        url: str,
        headers: Callable[[], Mapping[str, str]],
        connect_timeout_seconds: float,
        threads: Executor,
        tls: Callable[[], ssl.SSLContext],
    ) -> None:
        """Sends nothing yet."""
        self._url = url
        self._headers = headers
        self._connect_timeout_seconds = connect_timeout_seconds
        self._threads = threads
        self._tls = tls
        self._sent: dict[str | None, int] = {}
        """The version of each adapter that was sent last. Sent again, it comes whole, whatever the server has: it was
        not proven."""

    async def send(self, update: WeightUpdate, claim: LoadClaim) -> bytes:
        """Sends the files of a version, waits until the server has loaded them, and returns its answer.

        Raises `RequestRefused` if the server refuses or the files are no version, `ServerFailure` or `ServerUnreachable` if the
        server fails, else `InferenceError`: the files cannot be read now. Has no deadline for the loading.
        """
        again = self._sent.get(update.adapter) == update.version
        transfer = _Transfer(self._url, self._connect(), self._headers(), update, claim, whole=again)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, transfer.run)
        except asyncio.CancelledError:
            transfer.abort()
            raise
        finally:
            if transfer.has_begun:
                self._sent[update.adapter] = update.version

    def _connect(self) -> http.client.HTTPConnection:
        parts, seconds = urlsplit(self._url), self._connect_timeout_seconds
        assert parts.hostname is not None, "PoolConfig has checked the URL"
        if parts.scheme == "https":
            return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=seconds, context=self._tls())
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=seconds)


class _Transfer:
    """One version on its way to one server."""

    def __init__(
        self,
        url: str,
        connection: http.client.HTTPConnection,
        headers: Mapping[str, str],
        update: WeightUpdate,
        claim: LoadClaim,
        *,
        whole: bool,
    ) -> None:
        self._url = url
        self._whole = whole
        self._connection = connection
        self._headers = {**headers, "Content-Type": "application/octet-stream"}
        self._update = update
        self._claim = claim
        self._aborted = False
        self.has_begun = False
        """Whether the server may have got a part of the files."""

    def run(self) -> bytes:
        """Does it all; see `WeightSender.send`."""
        version = self._update.version
        with ExitStack() as stack:
            stack.callback(self._connection.close)
            try:
                offer, files = stack.enter_context(opened(self._update, self._claim))
            except (OSError, ValueError) as error:
                raise self._unsendable(error) from error
            try:
                return self._offer_and_send(offer, files)
            except TimeoutError as error:
                waited = f"{self._connection.timeout:g} s"
                raise ServerUnreachable(
                    f"{self._url} was silent for {waited} while version {version} was sent"
                ) from error
            except (OSError, http.client.HTTPException) as error:
                reason = str(error) or type(error).__name__
                raise ServerUnreachable(f"{self._url}, while version {version} was sent: {reason}") from error

    def abort(self) -> None:
        """Ends it soon, from another thread."""
        self._aborted = True
        if (connected := self._connection.sock) is not None:
            with suppress(OSError):  # it has ended already
                # Past TLS, whose own shutdown would let the other thread write in the clear.
                socket.socket.shutdown(connected, socket.SHUT_RDWR)

    def _offer_and_send(self, offer: WeightOffer, files: Mapping[str, FileIO]) -> bytes:
        self._open()
        self._post(OFFER_PATH, [encoded := offer.encode()], len(encoded))
        holds = _held(self._answer(), self._url)
        if not self._whole:
            offer = replace(offer, left_out=holds & offer.identities.keys())
        self.has_begun = True
        return self._send(offer, files)

    def _open(self) -> None:
        self._connection.connect()
        if self._aborted:  # while there was no socket to shut down
            raise ConnectionAbortedError("the caller gave up")
        self._connection.timeout = SILENT_SECONDS
        self._connection.sock.settimeout(SILENT_SECONDS)
        notice_loss(self._connection.sock)

    def _send(self, offer: WeightOffer, files: Mapping[str, FileIO]) -> bytes:
        try:
            self._post(SEND_PATH, self._pieces(offer, files), len(offer.preamble()) + offer.nbytes)
        except (BrokenPipeError, ConnectionResetError, ssl.SSLEOFError, ssl.SSLZeroReturnError):
            if self._aborted:
                raise
            return self._answer()  # it may have said why before it hung up
        self._wait_for_loading()
        return self._answer()

    def _wait_for_loading(self) -> None:
        """Lets the server take as long as its caller allows, unless its machine is gone."""
        self._connection.sock.settimeout(None)

    def _unsendable(self, error: Exception) -> InferenceError:
        """Returns what follows from an error of this machine's files: a later attempt may read them, unless it lasts."""
        passes = isinstance(error, OSError) and error.errno != errno.ENOENT and not is_permanent(error)
        kind = InferenceError if passes else RequestRefused
        return kind(f"version {self._update.version} cannot be sent: {error}")

    def _post(self, path: str, body: Iterable[bytes], nbytes: int) -> None:
        headers = {**self._headers, "Content-Length": str(nbytes)}
        self._connection.request("POST", urlsplit(self._url).path + path, body, headers)

    def _answer(self) -> bytes:
        response = self._connection.getresponse()
        if response.status != HTTPStatus.OK:
            raise failure_of(self._url, response.status, response.read(ERROR_BYTES))
        answer = response.read(MAX_ANSWER_BYTES)
        response.close()
        return answer

    def _pieces(self, offer: WeightOffer, files: Mapping[str, FileIO]) -> Iterator[bytes]:
        yield offer.preamble()
        for name, left in offer.coming.items():
            file = files[name]
            while left:
                try:
                    piece = file.read(min(PIECE_BYTES, left))
                except OSError as error:
                    raise self._unsendable(error) from error
                if self._aborted:
                    raise ConnectionAbortedError("the caller gave up")
                if not piece:
                    raise self._unsendable(ValueError(f"{file.name} lacks its last {left} bytes"))
                left -= len(piece)
                yield piece


def _held(answer: bytes, url: str) -> frozenset[str]:
    """Returns the files that a server holds. Raises `ServerFailure` for any other answer."""
    try:
        return frozenset(str(name) for name in orjson.loads(answer)["holds"])
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ServerFailure(f"{url} did not answer which files of an offer it holds: {error!r}") from error
