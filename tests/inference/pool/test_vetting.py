"""Servers that have to show that they fit: at the start, when they join later, and when they come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.inference.clients.client import ServerClient
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.pool.pool import InferencePool
from tests.inference.pool.test_pool import generate, until_states
from tests.support.fake_inference import FakeServer, weight_update
from tests.support.polling import until


@pytest.mark.parametrize("has_update", [False, True])
async def test_a_server_that_joins_or_comes_back_serves_only_once_it_fits(tmp_path: Path, has_update: bool) -> None:
    listing, unfit, asked = tmp_path / "urls", set[str](), list[str]()

    async def fits(client: ServerClient) -> None:
        asked.append(client.url)
        if client.url in unfit:
            raise ValueError(f"{client.url} is in another mode")

    async with FakeServer() as first, FakeServer() as second:
        listing.write_text(f"{first.url}\n")
        config = PoolConfig(urls=[], urls_file=listing, health_interval_seconds=0.02, startup_timeout_seconds=60)
        pool = InferencePool(config).model("a-model")
        try:
            await pool.start()
            unfit.add(first.url)
            with pytest.raises(ValueError, match="in another mode"):
                await pool.vet(fits)
            unfit.clear()
            await pool.vet(fits)
            if has_update:
                await pool.update(weight_update(1))
            assert asked == [first.url] * 2, "new weights are no reason to ask again"
            unfit.add(second.url)
            listing.write_text(f"{first.url}\n{second.url}\n")
            await until_states(pool, "serving", "out")
            assert f"{second.url} is in another mode" in pool.status()[1].reason
            assert {(await generate(pool, str(index))).server for index in range(8)} == {first.url}
            assert not second.asked
            unfit.clear()
            await until_states(pool, "serving", "serving")
            unfit.add(first.url)
            first.healthy = False
            await until_states(pool, "out", "serving")
            first.healthy = True
            await until(lambda: "in another mode" in pool.status()[0].reason, "the server that came back is asked")
            assert {(await generate(pool, str(index))).server for index in range(8)} == {second.url}
        finally:
            await pool.release()
