"""An S3 server for the chaos and for tests: moto's application, served from a thread of this process on a free port of loopback.

moto checks a condition and writes in two steps, so two of its threads could both succeed. Here one request is handled at a time,
as by a store that enforces its conditions; the body is read before, so that a client that stops in the middle blocks no other.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

Application = Callable[[dict[str, Any], Any], Iterable[bytes]]


def s3_application() -> Application:
    """Returns a WSGI application that enforces conditional writes. moto keeps all objects in this process."""
    moto: Any = DomainDispatcherApplication(create_backend_app)
    lock = threading.Lock()

    def one_at_a_time(environment: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if length := environment.get("CONTENT_LENGTH"):
            environment["wsgi.input"] = io.BytesIO(environment["wsgi.input"].read(int(length)))
        with lock:
            return list(moto(environment, start_response))

    return one_at_a_time


@contextlib.contextmanager
def serving(application: Application) -> Iterator[str]:
    """Serves an application and yields its address."""
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=_Quiet)
    thread = threading.Thread(target=server.serve_forever, name="s3", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def point_at(address: str) -> None:
    """Sets the environment so that this process and its children use the server as S3."""
    os.environ |= {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """Logs nothing: clients are killed in the middle of requests here."""
