"""Health checks while a server loads: what a server does not answer counts, not what this process sleeps."""

from __future__ import annotations

import asyncio
import time

import pytest

from counterpoint.inference.identity import STATUS_PATH
from counterpoint.inference.pool import liveness
from tests.inference.pool.test_pool import pool_of, until_states
from tests.support.fake_inference import FakeServer, weight_update
from tests.support.polling import until


@pytest.mark.slow
async def test_a_pause_of_this_process_is_no_silence_of_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(liveness, "SILENT_SECONDS", 0.4)
    async with FakeServer() as server, pool_of(server) as pool:
        server.load_gate.clear()
        update = asyncio.create_task(pool.update(weight_update(1)))
        await until_states(pool, "loading")
        seen = server.answers[STATUS_PATH]
        await until(lambda: server.answers[STATUS_PATH] >= seen + 2, "health checks")
        time.sleep(0.6)  # noqa: ASYNC251 - as a debugger stops it
        seen = server.answers[STATUS_PATH]
        await until(lambda: server.answers[STATUS_PATH] >= seen + 3, "further ones")
        server.load_gate.set()
        await update
        assert "no health check was answered" not in caplog.text


def test_what_a_server_does_not_answer_is_silence_once_it_lasts() -> None:
    silence = liveness.Silence()
    assert silence.patience == liveness.SILENT_SECONDS / 3
    for _ in range(3):
        assert silence.described("refused") == ""
        silence.goes_on(liveness.SILENT_SECONDS / 3)
    assert silence.patience == 0
    assert silence.described("refused") == "no health check was answered for 30 s (the last: refused)"
    silence.ends()
    assert silence.described("") == ""
