"""A model call that takes the direct way is answered as by the app: behind its guards, and with its handlers of exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from counterpoint.inference.plugin.calls.direct_route import DirectRoute

pytestmark = pytest.mark.slow  # imports vLLM

PATH = "/counterpoint/v1/generate"


class Counted:
    """A layer of the app, inside the direct way, that notes which paths reach it."""

    seen: list[str]

    def __init__(self, app: Any, seen: list[str]) -> None:
        self.app, self.seen = app, seen

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.seen.append(scope["path"])
        await self.app(scope, receive, send)


async def echo(request: Request) -> Response:
    body = await request.body()
    if body == b"value":
        raise ValueError("bad value")
    if body == b"key":
        raise KeyError("unexpected")
    return Response(body[::-1], media_type="application/octet-stream")


async def bad_value(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=400)


async def unexpected(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": type(error).__name__}, status_code=500)


def make_app(seen: list[str]) -> FastAPI:
    """In vLLM's order: its own layers, our routes, handlers, then the layers that guard."""
    from counterpoint.inference.plugin.authentication import (  # and with it vLLM, which takes seconds
        PlainBodies,
        RequireToken,
    )

    app = FastAPI()
    app.add_middleware(Counted, seen=seen)
    app.add_api_route(PATH, echo, methods=["POST"])
    app.add_middleware(DirectRoute, path=PATH, endpoint=echo)
    app.exception_handler(ValueError)(bad_value)
    app.exception_handler(Exception)(unexpected)
    app.add_middleware(PlainBodies)
    app.add_middleware(RequireToken)
    return app


def call(
    app: FastAPI,
    body: bytes,
    path: str = PATH,
    method: str = "POST",
    authorization: str = "Bearer right",
    codings: Sequence[str] = (),
) -> tuple[int, bytes]:
    """Makes one request by ASGI's own interface; returns status and body, also where the app raises after its answer."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def request() -> None:
        headers = [(b"authorization", authorization.encode())]
        headers += [(b"content-encoding", each.encode()) for each in codings]
        scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b""}
        with suppress(KeyError):
            await app(scope, receive, send)

    asyncio.run(request())
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


@pytest.fixture
def _token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("right\n")
    monkeypatch.setenv("COUNTERPOINT_API_KEY_FILE", str(tmp_path / "token"))


@pytest.mark.usefixtures("_token")
def test_a_call_is_answered_without_the_layers_in_between() -> None:
    seen: list[str] = []
    app = make_app(seen)
    assert call(app, b"abc") == (200, b"cba")
    assert seen == []
    assert call(app, b"", method="GET")[0] == 405
    assert call(app, b"", path="/elsewhere")[0] == 404
    assert seen == [PATH, "/elsewhere"]


@pytest.mark.usefixtures("_token")
def test_a_call_needs_the_token() -> None:
    for authorization in ("Bearer wrong", "Basic right", "right", ""):
        assert call(make_app([]), b"abc", authorization=authorization)[0] == 401
    assert call(make_app([]), b"abc", authorization="bearer right")[0] == 200


@pytest.mark.usefixtures("_token")
@pytest.mark.parametrize("codings", [["gzip"], ["identity", "gzip"]])
def test_a_compressed_body_is_refused_after_the_token(codings: list[str]) -> None:
    for path in (PATH, "/v1/completions"):
        assert call(make_app([]), b"abc", path, authorization="bearer wrong", codings=codings)[0] == 401
        status, body = call(make_app([]), b"abc", path, codings=codings)
        assert (status, b"compressed" in body) == (415, True)
    assert call(make_app([]), b"abc", codings=["identity"])[0] == 200


@pytest.mark.usefixtures("_token")
def test_tokens_are_those_that_the_file_has_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.transport.files.watched.LOOK_SECONDS", 0.0)
    app, file = make_app([]), tmp_path / "token"

    def taken() -> list[str]:
        return [token for token in ("right", "new") if call(app, b"abc", authorization=f"Bearer {token}")[0] == 200]

    assert taken() == ["right"]
    file.write_text("new\nright\n")
    assert taken() == ["right", "new"]
    file.write_text("new\n")
    assert taken() == ["new"]
    file.write_text("")
    assert taken() == ["new"], "what is no token replaces none"


@pytest.mark.usefixtures("_token")
def test_exceptions_are_answered_by_the_apps_handlers() -> None:
    app = make_app([])
    assert call(app, b"value") == (400, b'{"error":"bad value"}')
    assert call(app, b"key") == (500, b'{"error":"KeyError"}')
