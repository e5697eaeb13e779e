"""`MetricsEndpoint`: serves a process's values to Prometheus, and tells it where, by a file for its service discovery.

It listens on 127.0.0.1 unless told otherwise: whoever reaches it can read the metrics, of which none is a secret.

A thread accepts; a scrape is answered by a thread of its own, which reads the values and never waits for the loop, nor the
loop for it. `write_target` says where: `prometheus/<process>.json` in a job directory, for `file_sd_configs` of Prometheus.
The file of a process that was killed stays, and Prometheus shows that target as down.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import selectors
import socket
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from counterpoint.transport.errors import Obstructed, UserError
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.shared_directory import make_shared
from counterpoint.transport.loopback import is_loopback
from counterpoint.transport.process.permanent_errors import is_permanent
from counterpoint.transport.process.resident import resident_bytes
from counterpoint.transport.telemetry.metric import EVERYWHERE, OPEN_FILES, RESIDENT_MEMORY, Metric, Process
from counterpoint.transport.telemetry.values import Labels, MetricValues

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
"""The address at which it listens by default, and at which this machine finds one that listens on all addresses."""

EVERY_ADDRESS = "0.0.0.0"

TARGETS = "prometheus"
"""The folder of a job's directory for the files that say where its endpoints are."""

SCRAPES_AT_ONCE = 4
"""Further connections are closed: whoever opens many costs no more than these threads."""

REQUEST_SECONDS = 5.0
"""How long a scrape may take, the request and the answer together."""


class MetricsEndpoint:
    """Serves values from entry to exit: a context manager.

    On entry, raises `OSError` if the port cannot be had; the message says what to do.
    """

    def __init__(
        self, port: int, process: Process, labels: Mapping[str, str] | None = None, *, host: str = HOST
    ) -> None:
        """`port` 0 takes any free one. `labels` are the values of the labels that all metrics of the process have.

        `host` is the address to listen on. Beyond loopback, clients may call this machine by any name.
        """
        self._asked = port
        self._host = host
        self._labels = dict(labels or {})
        assert self._labels.keys() == process.labels.keys(), self._labels
        self._process = process
        self.values = MetricValues((*process.metrics, *EVERYWHERE))
        self.values.on_scrape(_of_process)
        self.port = 0
        """The port that is listened on, once entered."""
        self._targets: list[Path] = []

    def __enter__(self) -> MetricsEndpoint:
        from counterpoint.transport.telemetry.exposition import Exposition

        try:
            self._server = _Server(self._host, self._asked, Exposition(self.values, self._labels))
        except OSError as error:
            advice = "choose another port, or 0 for any free one"
            if error.errno != errno.EADDRINUSE and self._host != HOST:
                advice = "prometheus_host is an address of this machine, or 0.0.0.0 for all"
            message = f"prometheus_port = {self._asked}: cannot listen on {self._host}:{self._asked}: {error.strerror}; {advice}"
            raise OSError(error.errno, message) from error
        self.port = self._server.server_port
        self._server.start()
        logger.info("Prometheus metrics at http://%s:%d/metrics", self._host, self.port)
        return self

    def write_target(self, directory: Path, name: str | None = None, also: Path | None = None) -> None:
        """Writes the file for service discovery to a job's directory, and the same as `also`, whose directory is there.

        What cannot be written is warned about.
        """
        labels = {"counterpoint_job": directory.absolute().name, "process": self._process.name}
        host = HOST if self._host == EVERY_ADDRESS else self._host
        content = orjson.dumps([{"targets": [f"{host}:{self.port}"], "labels": labels}])
        found_by_prometheus = directory / TARGETS / f"{name or self._process.name}.json"
        with suppress(OSError):  # as the file in it
            directory.mkdir(parents=True, exist_ok=True)
            make_shared(found_by_prometheus.parent)
        for path, who in ((found_by_prometheus, "Prometheus does"), (also, "health checks do")):
            if path is None:
                continue
            self._targets.append(path)
            try:
                write_atomically(path, content, durable=False)
            except OSError as error:
                logger.warning("%s cannot be written, so %s not find this process: %s", path, who, error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop()
        for path in self._targets:
            with suppress(OSError):
                path.unlink(missing_ok=True)


class _Server(HTTPServer):
    """One thread accepts and blocks in between; it ends at once when asked to."""

    request_queue_size = 16

    def __init__(self, host: str, port: int, exposition: Any) -> None:
        self.exposition = exposition
        self.is_local = is_loopback(host)
        self._free = threading.BoundedSemaphore(SCRAPES_AT_ONCE)
        super().__init__((host, port), _Handler)
        self._asleep, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="prometheus", daemon=True)

    def server_bind(self) -> None:
        """Binds, and asks no name server for the name of this address, as the base does."""
        super(HTTPServer, self).server_bind()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def start(self) -> None:
        """Begins to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and closes the sockets."""
        self._wake.close()
        self._thread.join()
        self.server_close()
        self._asleep.close()

    def _serve(self) -> None:
        self.timeout = 0
        with selectors.DefaultSelector() as selector:
            selector.register(self.socket, selectors.EVENT_READ)
            selector.register(self._asleep, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._asleep in ready:
                    return
                self.handle_request()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread, unless there are too many."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        threading.Thread(target=self._answer, args=(request, client_address), name="scrape", daemon=True).start()

    def _answer(self, request: Any, client_address: Any) -> None:
        too_late = threading.Timer(REQUEST_SECONDS, _break_off, [request])
        too_late.daemon, too_late.name = True, "scrape"
        too_late.start()
        try:
            self.finish_request(request, client_address)
        except OSError as error:  # the client went away
            logger.debug("a scrape was broken off: %s", error)
        except Exception:
            logger.exception("a scrape failed")
        finally:
            too_late.cancel()
            self._free.release()
            self.shutdown_request(request)


def _break_off(connection: socket.socket) -> None:
    """Ends a connection: reading and writing it fail at once. A client that sends a byte now and then is never silent."""
    with suppress(OSError):  # it has ended just now
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """Answers `GET /metrics`; on loopback, of a client that called this machine by an address or as localhost.

    A web page of another site could otherwise read it through a name of its own that leads here (DNS rebinding).
    """

    server_version = "counterpoint"
    sys_version = ""
    server: _Server

    def do_GET(self) -> None:
        """Answers one request."""
        if self.server.is_local and not _is_own_address(self.headers.get("Host", HOST)):
            self._send(403, b"ask for this machine by its address\n", "text/plain")
        elif self.path.partition("?")[0] not in ("/", "/metrics"):
            self._send(404, b"the metrics are at /metrics\n", "text/plain")
        else:
            body, content_type = self.server.exposition.encode(self.headers.get("Accept", ""))
            self._send(200, body, content_type)

    def _send(self, code: int, body: bytes, content_type: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs nothing: a scrape comes every few seconds."""


def as_user_error(error: OSError) -> UserError:
    """Returns what a command says of an endpoint that could not be entered."""
    return (UserError if is_permanent(error) else Obstructed)(error.strerror)


def _is_own_address(host: str) -> bool:
    name = host[1 : host.index("]")] if host.startswith("[") and "]" in host else host.rpartition(":")[0] or host
    if name == "localhost":
        return True
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False


def _of_process() -> Iterable[tuple[Metric, Labels, float]]:
    """Returns what the system says of this process; nothing without `/proc`."""
    with suppress(OSError):
        yield RESIDENT_MEMORY, (), resident_bytes()
        yield OPEN_FILES, (), len(os.listdir("/proc/self/fd"))
