"""A page that stays open for a day: thousands of questions while the run goes on leave it as large as it was."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.serve.browser.jobs import small_job
from tests.serve.browser.reader import Reader

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="package")]

Open = Callable[..., AbstractAsyncContextManager[Reader]]

RUN = "/jobs/job/runs/run-0000"
VIEWS = ("/", "/jobs/job", f"{RUN}/loop")

POLLS = 2_000
"""More than an hour of a page that asks every two seconds, in some seconds."""

POLL_MANY = """async (times) => {
    const { application } = await import("./app.js");
    const fetcher = application.api.fetcher;
    const kept = new Map();
    let round = 0;
    application.api.fetcher = async (url, options) => {
        const headers = { Authorization: options.headers.Authorization };
        if (!kept.has(url)) kept.set(url, await (await fetcher(url, { ...options, headers })).json());
        const tag = `"${Math.floor(round / 5)}"`;
        if (options.headers["If-None-Match"] === tag) return new Response(null, { status: 304 });
        const answer = structuredClone(kept.get(url));
        for (const run of answer.runs ?? []) run.step += round;
        for (const series of answer.series ?? []) series.mean = series.mean.map((value) => value * (1 + 0.1 * Math.sin(round)));
        return new Response(JSON.stringify(answer), { headers: { ETag: tag } });
    };
    for (round = 0; round < times; round += 1) await application.poll();
    application.api.fetcher = fetcher;
}"""
"""Asks many times. The server's answers are kept, and one in five is a new one, with other numbers; so this measures the page."""


async def size(page: Reader) -> dict[str, float]:
    """Bytes of the heap, nodes and listeners after a garbage collection."""
    session = await page.page.context.new_cdp_session(page.page)
    await session.send("HeapProfiler.collectGarbage")
    await session.send("Performance.enable")
    found = (await session.send("Performance.getMetrics"))["metrics"]
    await session.detach()
    return {
        one["name"]: one["value"] for one in found if one["name"] in ("JSHeapUsedSize", "Nodes", "JSEventListeners")
    }


async def test_the_page_does_not_grow(reader: Open, tmp_path: Path) -> None:
    async with reader(small_job(tmp_path / "job"), path=RUN) as page:
        for path in (*VIEWS, RUN):
            await page.go(path)
            await page.page.evaluate(POLL_MANY, 30)
        before = await size(page)
        for path in (*VIEWS, RUN):
            await page.go(path)
            await page.page.evaluate(POLL_MANY, POLLS // (len(VIEWS) + 1))
        after = await size(page)
        assert after["JSHeapUsedSize"] < before["JSHeapUsedSize"] + 3e6, (before, after)
        assert after["Nodes"] < 1.2 * before["Nodes"] + 200, (before, after)
        assert after["JSEventListeners"] < 1.2 * before["JSEventListeners"] + 50, (before, after)
