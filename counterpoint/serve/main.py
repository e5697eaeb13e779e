"""Runs `counterpoint serve`: one process on uvloop, until a signal ends it.

It yields the CPU to everything else on the machine, and opens no connection to any process of a job.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import ssl
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from aiohttp import web

from counterpoint.job.serving.config import STATE, ServeConfig, links_of, token_files, url_of
from counterpoint.serve.access import load_tokens
from counterpoint.serve.app import Access, build_app
from counterpoint.serve.audit import AuditLog
from counterpoint.serve.jobs import Jobs
from counterpoint.serve.origin import own_names
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.watched import Watched
from counterpoint.transport.http.listening import listening
from counterpoint.transport.process.notify import Heartbeat, notify
from counterpoint.transport.process.stop_requests import StopSignals, end_at_second_request

logger = logging.getLogger(__name__)

NICE = 19
"""Least urgent: an orchestrator's loop, on the same machine, must not wait for a page."""

POLL_SECONDS = 0.5


def serve(
    directories: Sequence[Path], config: ServeConfig, say: Callable[[str], None], ready: Callable[[], None]
) -> int:
    """Serves the jobs until SIGTERM or SIGINT. Returns 0.

    `say` is given what a person needs to know at the start, `ready` is called once requests are answered. Raises `UserError`
    for a wrong configuration, and `Obstructed` for a port that is taken.
    """
    jobs = Jobs(directories)
    state = _state_directory(jobs, config)
    files = token_files(config, state)
    access = Access(
        load_tokens(*files),
        own_names(config.host, config.names),
        config.requests_per_second,
        config.changes_per_minute,
    )
    app = build_app(jobs, access, AuditLog(state))
    os.nice(max(0, NICE - os.nice(0)))  # of this thread and of those that it starts; the changes' threads live already
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(app, config, files, say, ready))
    return 0


@dataclass(frozen=True, slots=True)
class _Pair:
    """A certificate and its key, with a context that has both."""

    content: tuple[bytes, ...]
    context: ssl.SSLContext = field(compare=False)


class Certificate:
    """A certificate and its key, PEM files, and the context that new connections take.

    A context that is in use is never changed: files that are replaced while they are read would leave it with a certificate and
    no key. Each connection is given the newest one instead.
    """

    def __init__(self, certificate: Path, key: Path | None) -> None:
        """Raises `ValueError`, naming both files, unless they are a certificate and its key."""
        self._files = certificate, key
        self._watched = Watched(f"the certificate in {certificate.absolute()}", self._read)
        self.context = self._watched.value.context
        self.context.sni_callback = self._give

    def refresh(self) -> None:
        """Reads the files again. Blocks on the disk; what does not fit together is logged and changes nothing."""
        self._watched.refresh()

    def _give(self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        del name, context
        connection.context = self._watched.value.context

    def _read(self) -> _Pair:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            content = self._content()
            context.load_cert_chain(*self._files)
            if self._content() != content:
                raise OSError("they were replaced while they were read")
        except OSError as error:  # of a file or of its content
            certificate, key = self._files
            raise ValueError(
                f"tls_certificate = {str(certificate)!r}, tls_key = {str(key)!r}: {error}; expected PEM files of a "
                "certificate and of its key"
            ) from None
        return _Pair(content, context)

    def _content(self) -> tuple[bytes, ...]:
        return tuple(file.read_bytes() for file in self._files if file is not None)


async def _run(
    app: web.Application,
    config: ServeConfig,
    files: tuple[Path, Path],
    say: Callable[[str], None],
    ready: Callable[[], None],
) -> None:
    stopped = asyncio.Event()

    def stop(request: int, number: int) -> None:
        end_at_second_request(request, number)
        stopped.set()

    certificate = _certificate(config)
    context = certificate.context if certificate is not None else None
    async with listening(app, config.host, config.port, context) as port:
        say(_greeting(config, port, files, shows_tokens=sys.stdout.isatty()))
        notify(f"STATUS={url_of(config, port)}; {_opening(config, port, files[0])}")
        ready()
        heartbeat = Heartbeat()
        with StopSignals(stop):
            while not stopped.is_set():  # the handler of a signal runs when the loop wakes
                heartbeat.beat()
                if certificate is not None:
                    await asyncio.to_thread(certificate.refresh)
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS):
                        await stopped.wait()


def _greeting(config: ServeConfig, port: int, files: tuple[Path, Path], *, shows_tokens: bool) -> str:
    """Returns where the page is: a terminal gets links with the tokens, and a log, which others may read, commands."""
    address = url_of(config, port)
    if shows_tokens:
        return f"serving at {address}\n{links_of(address, files)}"
    to_change, to_look = (_opening(config, port, file) for file in files)
    begin = "the shell prints what to open in a browser:"
    return f"serving at {address}\n{begin}\n  to look:   {to_look}\n  to change: {to_change}"


def _opening(config: ServeConfig, port: int, token_file: Path) -> str:
    """Returns a command of the shell that prints what to open. The token itself is in no log."""
    return f'echo "{url_of(config, port)}#token=$(cat {shlex.quote(str(token_file))})"'


def _state_directory(jobs: Jobs, config: ServeConfig) -> Path:
    if config.state_directory is not None:
        return config.state_directory.absolute()
    first = jobs.named[0]
    if first.is_file():
        raise UserError(
            f"{first} is a file, and the tokens are kept in the first directory: name the output directory of a job "
            "first, or give --state-directory DIRECTORY"
        )
    if not first.is_dir() or not any(first.iterdir()):
        raise UserError(
            f"{first} is missing or empty, and the tokens would be kept in it, so that no job could begin there: start "
            "the job first, name a directory that holds one first, or give --state-directory DIRECTORY"
        )
    return first / STATE


def _certificate(config: ServeConfig) -> Certificate | None:
    if config.tls_certificate is None:
        return None
    try:
        return Certificate(config.tls_certificate, config.tls_key)
    except ValueError as error:
        raise UserError(str(error)) from None
