"""Tokens that an operator replaces while a run goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from counterpoint.inference.base import WeightUpdate
from counterpoint.inference.clients import http_sessions
from counterpoint.transport.files import watched
from counterpoint.transport.files.atomic import STABLE
from tests.inference.pool.test_pool import generate, pool_of, until_states
from tests.support.fake_inference import FakeServer, weight_update
from tests.support.polling import until


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (watched, http_sessions):
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    write(file, "old")
    return file


def write(file: Path, *tokens: str) -> None:
    file.write_text("".join(f"{each}\n" for each in tokens))


def update_in(directory: Path, version: int) -> WeightUpdate:
    directory.mkdir()
    (directory / STABLE).touch()
    (directory / "model.safetensors").write_bytes(b"weights")
    return WeightUpdate(version, directory, weight_update(version).probe, None)


async def test_a_token_is_replaced_without_a_failure(file: Path, tmp_path: Path) -> None:
    """By model calls, administration and weights that are sent."""
    async with FakeServer() as server, pool_of(server, api_key_file=file, send_weights=True, max_retries=0) as pool:
        await pool.update(update_in(tmp_path / "step_1", 1))
        server.tokens = ("new", "old")
        write(file, "new", "old")
        await until(lambda: "Bearer new" in server.given, "the new token")
        server.tokens, server.given = ("new",), set()
        await generate(pool)
        await pool.update(update_in(tmp_path / "step_2", 2))
        assert server.version == 2
        assert server.given == {"Bearer new"}


async def test_a_token_that_comes_late_ends_no_request(file: Path) -> None:
    settings: dict[str, Any] = {"api_key_file": file, "max_retries": 9}
    async with FakeServer() as server, pool_of(server, **settings) as pool:
        await until_states(pool, "serving")
        server.tokens = ("new",)
        await until_states(pool, "out")
        asked = asyncio.create_task(generate(pool))
        write(file, "new")
        await until_states(pool, "serving")
        assert (await asked).server == server.url
