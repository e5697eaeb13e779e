"""A pool's list of outages: what each server was out for last, and since when it has not answered."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from counterpoint.inference.config import PoolConfig
from counterpoint.inference.pool.pool import InferencePool
from counterpoint.transport.outages import OutageKind, Outages
from tests.support.fake_inference import FakeServer
from tests.support.polling import until


async def test_a_further_reason_of_an_outage_is_told_as_the_first_was(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    outages = Outages()
    async with FakeServer() as server:
        config = PoolConfig(urls=[server.url], health_interval_seconds=0.02, startup_timeout_seconds=60)
        pool = InferencePool(config, outages=outages).model("a-model")
        server.healthy = False
        starting = asyncio.create_task(pool.start())
        try:
            await until(lambda: "waiting for inference server" in outages.describe(), "a start that lasts")
            assert "takes no traffic" not in outages.describe()
            server.healthy = True
            await starting
            assert outages.current() == []
            well = time.time()
            port = server.port
            await server.vanish()
            await until(lambda: bool(outages.current()), "the outage")
            [outage] = outages.current()
            assert outage.what == "takes no traffic"
            assert (outage.kind, outage.who) == (OutageKind.SERVER, f"inference server {server.url}")
            assert well - 60 < outage.since < time.time()
            server.healthy = False
            await server.listen(port)
            await until(lambda: "503" in outages.describe(), "the newest reason")
            assert [each.since for each in outages.current()] == [outage.since]
            server.healthy = True
            await until(lambda: not outages.current(), "the end of the outage")
        finally:
            await pool.release()
    logged = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert [any(f"{status}" in line for line in logged) for status in ("503", "onnect")] == [True, True]
    assert len(logged) == 2, "each reason once"


async def test_an_outage_that_lasts_is_not_told_to_be_over_when_the_pool_closes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    outages = Outages()
    async with FakeServer() as server:
        config = PoolConfig(urls=[server.url], health_interval_seconds=0.02, startup_timeout_seconds=60)
        pool = InferencePool(config, outages=outages)
        policy, evaluated = pool.model("policy"), pool.model("evaluated", called="the evaluations'")
        await policy.start()
        await evaluated.start()
        server.healthy = False
        await until(lambda: len(outages.current()) == 2, "an outage for each name")
        await evaluated.release()
        assert [each.who for each in outages.current()] == [f"inference server {server.url}"]
        caplog.clear()
        await policy.release()
    assert [each.who for each in outages.current()] == [f"inference server {server.url}"]
    assert "is over" not in caplog.text
