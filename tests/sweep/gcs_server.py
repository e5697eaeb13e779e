"""Google Cloud Storage's JSON API, as much of it as a sweep asks for, enforcing generations: upload, download, list, delete."""

from __future__ import annotations

import contextlib
import email
import email.policy
import itertools
import json
import math
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class Bucket:
    """One bucket's objects with their generations, changed one request at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.generations = itertools.count(1_700_000_000_000_000)
        self.ignores_conditions = False
        self.interval = 0.0
        """Seconds: an earlier next write of the same name is refused, as Google's storage does (it may be one a second)."""
        self.busy = 0
        """So many writes to come are refused for no reason."""
        self.unavailable = 0
        """So many requests to come get a 503."""
        self.refused_for_pace = 0
        self.written_at: dict[str, float] = {}

    def keeps_pace(self, name: str) -> bool:
        """Whether another write of this name may be tried now."""
        with self.lock:
            now, before = time.monotonic(), self.written_at.get(name, -math.inf)
            self.written_at[name] = now
            too_soon = now - before < self.interval or self.busy > 0
            self.busy -= self.busy > 0
            self.refused_for_pace += too_soon
            return not too_soon

    def put(self, name: str, data: bytes, condition: str | None) -> int | None:
        """The new generation, or None when the condition does not hold."""
        with self.lock:
            current = self.objects[name][0] if name in self.objects else 0
            if condition is not None and int(condition) != current and not self.ignores_conditions:
                return None
            self.objects[name] = (next(self.generations), data)
            return self.objects[name][0]


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    bucket: Bucket

    def do_GET(self) -> None:
        """A download (`alt=media`) or a list."""
        path, query = self._asked()
        if path.endswith("/o"):
            prefix = query.get("prefix", "")
            names = [name for name in sorted(self.bucket.objects) if name.startswith(prefix)]
            items = [_resource(name, self.bucket.objects[name][0]) for name in names if "/" not in name[len(prefix) :]]
            return self._reply(200, {"kind": "storage#objects", "items": items})
        name = path.partition("/o/")[2]
        if name not in self.bucket.objects:
            return self._reply(404, {"error": {"code": 404, "message": "No such object"}})
        generation, data = self.bucket.objects[name]
        last = int(self.headers["Range"].partition("-")[2])
        content = f"bytes 0-{min(last, len(data) - 1)}/{len(data)}"
        self._reply(206, data[: last + 1], {"X-Goog-Generation": str(generation), "Content-Range": content})

    def do_POST(self) -> None:
        """A multipart upload."""
        path, query = self._asked()
        body = self.rfile.read(int(self.headers["Content-Length"]))
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        description, content = email.message_from_bytes(head + body, policy=email.policy.HTTP).iter_parts()
        name = json.loads(description.get_content())["name"]
        data = content.get_payload(decode=True)
        assert path.endswith("/o")
        assert isinstance(data, bytes)
        if not self.bucket.keeps_pace(name):
            return self._reply(429, {"error": {"code": 429, "message": "rateLimitExceeded"}})
        generation = self.bucket.put(name, data, query.get("ifGenerationMatch"))
        if generation is None:
            return self._reply(412, {"error": {"code": 412, "message": "conditionNotMet"}})
        self._reply(200, _resource(name, generation))

    def do_DELETE(self) -> None:
        """Deletes one object."""
        name = self._asked()[0].partition("/o/")[2]
        found = self.bucket.objects.pop(name, None)
        if found is None:
            return self._reply(404, {"error": {"code": 404, "message": "No such object"}})
        self._reply(204, b"")

    def _asked(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        return unquote(parts.path), {name: values[-1] for name, values in parse_qs(parts.query).items()}

    def parse_request(self) -> bool:
        """Answers with a 503 in place of a method if the bucket is unavailable."""
        if not super().parse_request():
            return False
        with self.bucket.lock:
            refused = self.bucket.unavailable > 0
            self.bucket.unavailable -= refused
        if refused:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._reply(503, {"error": {"code": 503, "message": "backendError"}})
        return not refused

    def _reply(self, code: int, content: dict[str, Any] | bytes, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        self.send_header(
            "Content-Type", "application/octet-stream" if isinstance(content, bytes) else "application/json"
        )
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def _resource(name: str, generation: int) -> dict[str, Any]:
    return {"kind": "storage#object", "name": name, "bucket": "bucket", "generation": str(generation)}


@contextlib.contextmanager
def google_server(bucket: Bucket) -> Iterator[str]:
    """Serves it, and yields its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BucketHandler", (Handler,), {"bucket": bucket}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
