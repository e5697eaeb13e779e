"""A webhook for the tests: a real HTTP server that keeps what it gets, and answers as it is told."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Receiver:
    """What a server got, and what it answers."""

    def __init__(self) -> None:
        self.got: list[dict[str, Any]] = []
        self.requests = 0
        self.headers: list[dict[str, str]] = []
        self.answers: list[int] = []
        """The next answers; then 200."""
        self.location = ""
        """Where a redirect leads."""
        self.hang = threading.Event()
        """Cleared: no answer until it is set."""
        self.hang.set()
        self.url = ""


@contextmanager
def receiving(context: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """Serves for the length of the block."""
    receiver = Receiver()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.requests += 1
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            receiver.headers.append(dict(self.headers))
            receiver.hang.wait(20)
            status = receiver.answers.pop(0) if receiver.answers else 200
            if status == 200:
                receiver.got.append(body)
            try:
                self.send_response(status)
                if receiver.location:
                    self.send_header("Location", receiver.location)
                self.send_header("Content-Length", "0")
                self.end_headers()
            except OSError:
                self.close_connection = True  # the client has gone

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        receiver.url = f"{'http' if context is None else 'https'}://127.0.0.1:{server.server_port}/a-secret-path"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield receiver
        finally:
            receiver.hang.set()
            server.shutdown()
            thread.join()
