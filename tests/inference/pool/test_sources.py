"""Where a pool's servers come from: fixed, by name, in a watched file; and what is wrong with one leaves the others."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from counterpoint.inference.config import PoolConfig
from counterpoint.inference.pool.sources import Sources, parse_listing


def test_a_file_has_a_url_a_line_and_its_mistakes_are_numbered() -> None:
    listing, mistakes = parse_listing(
        "# the first rack\nhttp://10.0.0.1:8000/\n\n  drain http://10.0.0.2:8000  # for its new fan\n"
        "10.0.0.3:8000\nhttp://a http://b\ndrain\nhttps://inference.example\n"
    )
    assert listing == {
        "http://10.0.0.1:8000": "",
        "http://10.0.0.2:8000": "its line in urls_file begins with drain",
        "https://inference.example": "",
    }
    assert [number for number, _ in mistakes] == [5, 6, 7]
    assert mistakes[0][1] == "'10.0.0.3:8000' is no server: http://HOST:PORT is expected"


async def test_a_key_that_travels_unencrypted_to_another_machine_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = tmp_path / "key"
    safe = ["http://127.0.0.1:8000", "http://[::1]:1", "http://localhost:2", "https://inference.example"]
    await Sources(PoolConfig(urls=safe, api_key_file=key)).read()
    await Sources(PoolConfig(urls=["http://10.0.0.1:8000"])).read()
    assert not caplog.records
    for _ in range(2):
        await Sources(PoolConfig(urls=[*safe, "http://10.0.0.1:8000", "http://10.0.0.2:8000"], api_key_file=key)).read()
    (warned,) = caplog.records
    assert (warned.levelno, str(key) in warned.message) == (logging.WARNING, True)
    assert "http://10.0.0.1:8000 and 1 other" in warned.message


@pytest.mark.parametrize(
    "line", ["ftp://a", "http://", "http://a:port", "http://a:99999", "http://[::1", "http://a?x=1", "http://a\x07b"]
)
def test_what_is_no_server_is_a_mistake(line: str) -> None:
    listing, mistakes = parse_listing(line)
    assert not listing
    assert len(mistakes) == 1


async def test_a_file_is_read_while_every_thread_of_the_environments_hangs(tmp_path: Path) -> None:
    path = tmp_path / "servers"
    path.write_text("http://one\n")
    released, hangs = threading.Event(), threading.Event()

    def hang() -> None:
        hangs.set()
        released.wait()

    with ThreadPoolExecutor(max_workers=1) as environments:
        asyncio.get_running_loop().set_default_executor(environments)
        environments.submit(hang)
        assert hangs.wait(60)
        try:
            async with asyncio.timeout(60):
                assert await Sources(PoolConfig(urls_file=path)).read() == {"http://one": ""}
        finally:
            released.set()


async def test_a_file_is_read_again_and_its_absence_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "counterpoint.inference.pool.sources")
    path = tmp_path / "servers"
    sources = Sources(PoolConfig(urls=["http://fixed/"], urls_file=path))
    assert await sources.read() == {"http://fixed": ""}
    assert await sources.read() == {"http://fixed": ""}
    assert [record.levelname for record in caplog.records] == ["ERROR"], "it is said once"
    assert "No such file" in sources.describe()
    path.write_text("http://one\nhalf a line\n")
    assert await sources.read() == {"http://fixed": "", "http://one": ""}
    assert f"{path}:2: 'half a line': one URL is expected" in caplog.messages[-1]
    path.write_text("<html>502 Bad Gateway</html>\n")
    assert await sources.read() == {"http://fixed": "", "http://one": ""}, "a mistake drops nothing that was known"
    path.write_text("drain http://fixed\nhttp://two\n")
    assert list(await sources.read()) == ["http://fixed", "http://two"]
    assert (await sources.read())["http://fixed"], "a line of the file has the last word"
    path.unlink()
    assert list(await sources.read()) == ["http://fixed", "http://two"]


async def test_a_file_that_is_too_long_or_no_text_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "servers"
    path.write_text("http://one\n")
    sources = Sources(PoolConfig(urls_file=path))
    assert await sources.read() == {"http://one": ""}
    for content in (b"http://two\n" * 100_000, b"\xff\xfe"):
        path.write_bytes(content)
        assert await sources.read() == {"http://one": ""}
        assert str(path) in sources.describe()


async def test_every_address_of_a_name_is_a_server_and_a_failed_look_up_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import asyncio

    answer: list[Any] | OSError = []

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        assert (host, port) == ("inference.example", 8000)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    sources = Sources(PoolConfig(dns="http://inference.example:8000"))
    answer = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.2", 8000)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 8000)),
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 8000, 0, 0)),
    ]
    both = {"http://10.0.0.1:8000": "", "http://10.0.0.2:8000": "", "http://[fd00::1]:8000": ""}
    assert await sources.read() == both
    answer = socket.gaierror(-2, "Name or service not known")
    assert await sources.read() == both
    assert "http://inference.example:8000 cannot be resolved: [Errno -2]" in sources.describe()
    answer = []
    assert await sources.read() == {}


async def test_a_real_name_resolves() -> None:
    sources = Sources(PoolConfig(dns="http://localhost:8123"))
    assert "http://127.0.0.1:8123" in await sources.read()


def test_the_default_address_gives_way_to_another_source(tmp_path: Path) -> None:
    assert PoolConfig().urls == ["http://127.0.0.1:8000"]
    named = PoolConfig(dns="http://inference:8000")
    assert named.urls == []
    assert PoolConfig.model_validate(named.model_dump()) == named, "as a role's own file is written"
    assert PoolConfig(urls=["http://a"], urls_file=tmp_path / "x").urls == ["http://a"]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"urls": []}, "no server would be asked"),
        ({"dns": "https://inference:8000"}, "http://NAME:PORT is expected"),
        ({"dns": "inference:8000"}, "is no server"),
        ({"dns": "http://inference:8000/v1"}, "http://NAME:PORT is expected"),
    ],
)
def test_a_source_that_cannot_work_is_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        PoolConfig(**settings)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://x", "http://[::1", "http://h:99999", "", "http://u:secret@h:1"]
)
def test_a_fixed_address_that_is_no_server_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ValidationError) as refused:
        PoolConfig(urls=[url])
    assert "expected" in str(refused.value) or "holds no user or password" in str(refused.value)


def test_a_fixed_address_has_no_slash_at_its_end() -> None:
    assert PoolConfig(urls=["http://a:1/"]).urls == ["http://a:1"]
