"""A store's server behind a wire that fails as networks and gateways do: it resets, cuts answers, gives others, is slow."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

SLOW_SECONDS = 1.0
"""How long an answer that does not come is waited for; a client's deadline is to be shorter."""

NO_ANSWERS = ("reset", "hung up", "no answer", "garbage", "408", "429", "500", "502", "503", "504")
CUT_ANSWERS = ("cut in the head", "cut in the body", "reset in the body", "stalls in the body")
OTHER_ANSWERS = ("a page", "nothing")
"""Status 200, and not of the store: a gateway's page, or no content."""


class Wire:
    """How the next requests fail: `fault` for so many, once the server has carried them out, or before."""

    def __init__(self) -> None:
        self.fault, self.left, self.is_carried_out = "", 0, False
        self.spoilt = 0

    def spoil(self, fault: str, count: int, is_carried_out: bool = False) -> None:
        """Sets them."""
        self.fault, self.left, self.is_carried_out = fault, count, is_carried_out


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        assert isinstance(request, socket.socket)
        request.close()  # without FIN, which would come before a reset


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream: str
    wire: Wire

    def _forward(self) -> None:
        body, wire = self.rfile.read(int(self.headers.get("Content-Length") or 0)), self.wire
        spoilt = wire.left > 0
        wire.left -= spoilt
        answer = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"<" * 100
        if not spoilt or (wire.is_carried_out and wire.fault != "429"):  # which says that nothing was written
            answer = self._answer(body)
        if spoilt:
            self.close_connection = True
            self._spoil(wire.fault, answer)
        else:
            self.wfile.write(answer)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward

    def _answer(self, body: bytes) -> bytes:
        server = HTTPConnection(urlsplit(self.upstream).netloc)
        with contextlib.closing(server):
            server.request(self.command, self.path, body, dict(self.headers.items()))
            answer = server.getresponse()
            data = answer.read()
        kept = [
            f"{name}: {value}" for name, value in answer.getheaders() if name not in ("Connection", "Content-Length")
        ]
        length = [] if answer.status == 204 else [f"Content-Length: {len(data)}"]
        return (
            "\r\n".join([f"HTTP/1.1 {answer.status} OK", "Connection: close", *kept, *length, "", ""]).encode() + data
        )

    def _spoil(self, fault: str, answer: bytes) -> None:
        head, _, data = answer.partition(b"\r\n\r\n")
        what, _, where = fault.partition(" in the ")
        match fault:
            case "garbage":
                sent = b"\x00\x01 nobody speaks HTTP here\r\n\r\n"
            case "a page":
                sent = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 14\r\n\r\n<html>hi</html>"
            case "nothing":
                sent = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
            case _ if fault.isdigit():
                sent = f"HTTP/1.1 {fault} Sorry\r\nConnection: close\r\nContent-Length: 12\r\n\r\n<html>sorry<".encode()
            case _ if where == "head":
                sent = head[: len(head) // 2]
            case _ if where == "body":
                sent = head + b"\r\n\r\n" + data[: len(data) // 2]
            case _:
                sent = b""
        self.wfile.write(sent)
        if what in ("no answer", "stalls"):
            time.sleep(SLOW_SECONDS)
        if what == "reset":
            time.sleep(0.05 if sent else 0.0)  # or the reset overtakes what was sent
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextlib.contextmanager
def faulty_wire(upstream: str) -> Iterator[tuple[str, Wire]]:
    """Serves what the server at `upstream` does; yields its address, and what spoils its answers."""
    wire = Wire()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"upstream": upstream, "wire": wire}))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", wire
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
