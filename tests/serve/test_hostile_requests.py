"""Foreign pages, hostile names and floods get nothing, and cost little."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import aiohttp
import pytest

from counterpoint.serve.access import MOST_CLIENTS, RateLimit
from counterpoint.serve.endpoint import ROOT, NotFound
from counterpoint.serve.errors import Forbidden
from counterpoint.serve.jobs import Jobs
from counterpoint.serve.origin import check_origin, own_names
from counterpoint.transport.http.listening import listening
from tests.serve.api_client import ADMIN, READ, api, app_of

OWN = own_names("127.0.0.1", ["Runs.Example.org"])


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "localhost:8400"},
        {"Host": "127.0.0.1:8400", "Origin": "http://127.0.0.1:8400", "Sec-Fetch-Site": "same-origin"},
        {"Host": "[::1]:8400"},
        {"Host": "runs.example.org", "Origin": "https://runs.example.org"},
        {"Host": "RUNS.example.org:443", "Sec-Fetch-Site": "none"},
    ],
)
def test_our_own_names_pass(headers: dict[str, str]) -> None:
    check_origin(headers, OWN, is_api=True)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Host": ""},
        {"Host": "evil.example"},
        {"Host": "evil.example:8400"},
        {"Host": "localhost.evil.example"},
        {"Host": "localhost@evil.example"},
        {"Host": "evil.example/localhost"},
        {"Host": "[::1"},
        {"Host": "localhost:8400", "Origin": "http://evil.example"},
        {"Host": "localhost:8400", "Origin": "http://localhost:3000"},
        {"Host": "localhost:8400", "Origin": "null"},
        {"Host": "localhost:8400", "Origin": "file://localhost:8400"},
        {"Host": "localhost:8400", "Sec-Fetch-Site": "cross-site"},
        {"Host": "localhost:8400", "Sec-Fetch-Site": "same-site"},
    ],
)
def test_foreign_pages_do_not_pass(headers: dict[str, str]) -> None:
    with pytest.raises(Forbidden):
        check_origin(headers, OWN, is_api=True)


async def test_what_is_no_http_is_refused_and_leaves_no_trace_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(app_of(tmp_path), "127.0.0.1", 0, None) as port:
        for request in (b"GET /\xff HTTP/1.1\r\n\r\n", f"GET / HTTP/1.1\r\nAuthorization: {READ}\x01\r\n\r\n".encode()):
            async with asyncio.timeout(60):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request)
                answer = await reader.read()
                writer.close()
                await writer.wait_closed()
            assert answer.startswith(b"HTTP/1.0 400 ")
    assert not caplog.records


async def test_slow_connections_without_a_token_keep_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("counterpoint.transport.http.listening.MOST_CONNECTIONS", 20)
    known = f"GET {ROOT}/session HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {READ}\r\n\r\n".encode()
    stranger = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"  # and no end
    opened = []

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(known)
        return (await reader.readline()) + (await reader.readuntil(b"}"))

    async with listening(app_of(tmp_path), "127.0.0.1", 0, None) as port, asyncio.timeout(120):
        first = await asyncio.open_connection("127.0.0.1", port)
        assert b" 200 " in await ask(*first)
        for _ in range(100):
            opened.append(await asyncio.open_connection("127.0.0.1", port))
            opened[-1][1].write(stranger)
        assert b" 200 " in await ask(*first)  # kept, though it is the oldest
        late = await asyncio.open_connection("127.0.0.1", port)
        assert b" 200 " in await ask(*late)
        assert await opened[0][0].read() == b""  # made room
        for _, writer in (first, late, *opened):
            writer.close()


async def test_a_rebound_name_gets_neither_page_nor_api(tmp_path: Path) -> None:
    async with api(tmp_path) as client:
        for path in ("/", f"{ROOT}/jobs"):
            assert (await client.request("GET", path, headers={"Host": "evil.example"})).status == 403
        answer = await client.request("GET", f"{ROOT}/jobs", headers={"Origin": "http://evil.example"})
        assert answer.status == 403
        assert "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/jobs", "/%61pi/v1/jobs", "//api/v1/jobs", "/x/../api/v1/jobs", "/./api/v1/jobs", "/api%2Fv1/jobs",
        "/api/v1/jobs/", "/api/v1//jobs", "/API/v1/jobs", "/api/v1/jobs;x", "http://localhost/api/v1/jobs", "/api/v1/jobs#/",
    ],
)  # fmt: skip
async def test_no_spelling_of_a_path_needs_no_token(tmp_path: Path, path: str) -> None:
    async with api(tmp_path) as client:
        assert client.http.port is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", client.http.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        status = int((await asyncio.wait_for(reader.readline(), 60)).split()[1])
        writer.close()
        await writer.wait_closed()
    assert status in (400, 401, 403, 404)


@pytest.mark.parametrize(
    "run",
    ["..", ".", "a/b", "%2e%2e", "a%00b", "a%0ab", "link", "file", "x" * 65, "x" * 5000, "%F0%9F%92%A9", "missing"],
)
async def test_no_name_leads_out_of_a_job(tmp_path: Path, run: str) -> None:
    job, secret = tmp_path / "job", tmp_path / "secret"
    (secret / "control").mkdir(parents=True)
    job.mkdir()
    (job / "run_link").symlink_to(secret)
    (job / "run_file").touch()
    async with api(job) as client:
        response = await client.request("GET", f"{ROOT}/jobs/job/runs/{run}/control", READ)
        assert response.status in (400, 404)


def test_a_run_is_a_directory_and_no_link(tmp_path: Path) -> None:
    (tmp_path / "job" / "run_a").mkdir(parents=True)
    (tmp_path / "job" / "run_link").symlink_to(tmp_path)
    jobs = Jobs([tmp_path / "job"])
    job = jobs.get("job")
    assert job.run_directory("a") == tmp_path / "job" / "run_a"
    for name in ("", "..", "link", "a/../a", "a\0", "a\n", "b"):
        with pytest.raises(NotFound):
            job.run_directory(name)
    with pytest.raises(NotFound):
        jobs.get("../job")


async def test_large_and_wrong_bodies_are_refused(tmp_path: Path) -> None:
    (tmp_path / "job" / "run_a").mkdir(parents=True)
    path = f"{ROOT}/jobs/job/runs/a/pause"
    async with api(tmp_path / "job") as client:
        json = {"Content-Type": "application/json"}
        for body, headers, status in (
            (b"x" * 2**17, json, 413),
            (b"{}", {"Content-Type": "text/plain"}, 415),
            (b"{", json, 400),
            (b"[1]", json, 400),
            (b'{"reason": 1}', json, 400),
            (b'{"run": "b"}', json, 400),
            (b"[" * 60_000, json, 400),
            (b'{"wait_seconds": 1e999}', json, 400),
            (b'{"wait_seconds": 1%s}' % (b"0" * 400), json, 400),
            (b'{"wait_seconds": 1%s}' % (b"0" * 50_000), json, 400),
            (b'{"reason": %s%s}' % (b"[" * 300, b"]" * 300), json, 400),
            (b'{"reason": "\\ud800"}', json, 400),
        ):
            response = await client.request("POST", path, data=body, headers=headers)
            assert response.status == status, body[:40]
            assert (await response.json())["error"]["what"]


async def test_a_compressed_body_is_refused_after_the_token_and_never_decompressed(tmp_path: Path) -> None:
    (tmp_path / "job" / "run_a").mkdir(parents=True)
    async with listening(app_of(tmp_path / "job"), "127.0.0.1", 0, None) as port, aiohttp.ClientSession() as client:
        url = f"http://127.0.0.1:{port}{ROOT}/jobs/job/runs/a/pause"
        for token, status in (("wrong", 401), (ADMIN, 415)):
            headers = [("Content-Type", "application/json"), ("Authorization", f"BEARER {token}")]
            for codings in (["gzip"], ["identity", "deflate"]):
                more = [("Content-Encoding", each) for each in codings]
                async with client.post(url, data=b"no gzip" * 1000, headers=headers + more) as answer:
                    assert answer.status == status
                    assert status == 401 or "compressed" in (await answer.json())["error"]["what"]


def test_a_client_that_asks_too_often_waits_and_no_other_does() -> None:
    now = [0.0]
    limit = RateLimit(2.0, 4.0, lambda: now[0])
    assert [limit.take("10.0.0.1") for _ in range(5)] == [0, 0, 0, 0, 0.5]
    assert limit.take("10.0.0.2") == 0
    now[0] = 0.5
    assert [limit.take("10.0.0.1") for _ in range(2)] == [0, 0.5]
    now[0] = 1000.0
    assert [limit.take("10.0.0.1") for _ in range(5)] == [0, 0, 0, 0, 0.5]


def test_a_network_of_many_addresses_is_one_client_and_few_are_remembered() -> None:
    limit = RateLimit(1.0, 1.0, lambda: 0.0)
    assert [limit.take(f"2001:db8::{number}") > 0 for number in (1, 2, 3)] == [False, True, True]
    for number in range(2 * MOST_CLIENTS):
        limit.take(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert len(limit) == MOST_CLIENTS


async def test_a_right_token_passes_a_flood_of_wrong_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """None of them is in the log, since a wrong one may be a right one elsewhere."""
    caplog.set_level(logging.DEBUG)
    async with api(tmp_path) as client:
        wrong = [(await client.request("GET", f"{ROOT}/jobs", "wrong" * 5)).status for _ in range(60)]
        assert set(wrong) == {401, 429}
        response = await client.request("GET", f"{ROOT}/jobs", READ)
        assert response.status == 200
    assert "a wrong token" in caplog.text
    assert "wrongwrong" not in caplog.text
    assert READ not in caplog.text


async def test_floods_are_answered_with_429(tmp_path: Path) -> None:
    async with api(tmp_path, requests_per_second=0.01) as client:
        first, second = [await client.request("GET", "/") for _ in range(2)]
        assert (first.status, second.status) == (200, 429)
        assert 1 <= int(second.headers["Retry-After"]) <= 100
