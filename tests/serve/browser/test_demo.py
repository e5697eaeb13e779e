"""The page of a real demo: `counterpoint run` with vLLM, and `serve` as one of its workers, watched and stopped in a browser."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from playwright.async_api import Browser, Page, expect

from tests.serve.browser.reader import DEADLINE_MILLISECONDS
from tests.support.ports import free_port
from tests.support.running_job import RunningJob, assert_nothing_is_left

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="package"),
]

DEMO = Path(__file__).parents[3] / "configs" / "demo.toml"

PATIENCE_MILLISECONDS = 4 * DEADLINE_MILLISECONDS
"""The longest wait for what needs the server, which yields the CPU to vLLM."""

SCRIPT = "<script>document.title='owned'</script>"


def demo(directory: Path) -> dict[str, Any]:
    """The demo's configuration, with the page, and a task whose prompt is a script."""
    data = directory / "hostile.jsonl"
    data.write_text("".join(json.dumps({"question": f"{number}{SCRIPT}", "answer": "a"}) + "\n" for number in range(8)))
    job = tomllib.loads(DEMO.read_text())
    hostile = {
        "name": "hostile",
        "kind": "single-turn",
        "ratio": 1.0,
        "args": {
            "data": {"path": str(data)},
            "prompt": "{question}",
            "answer": "answer",
            "rubric": [{"name": "has-a", "kind": "regex", "pattern": "a", "weight": 1.0}],
        },
    }
    orchestrator = job["orchestrator"] | {"environments": [*job["orchestrator"]["environments"], hostile]}
    return job | {
        "output_dir": str(directory / "demo"),
        "inference": job["inference"] | {"port": free_port()},
        "orchestrator": orchestrator,
        "serve": {"port": free_port()},
    }


@asynccontextmanager
async def opened(browser: Browser, url: str) -> AsyncIterator[tuple[Page, list[str]]]:
    """A tab with the address, and what its scripts complain about."""
    context = await browser.new_context()
    context.set_default_timeout(PATIENCE_MILLISECONDS)
    page = await context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    try:
        await page.goto(url)
        yield page, complaints
    finally:
        await context.close()


@pytest.mark.promise("a run is watched and changed in a browser")
async def test_a_real_demo_is_watched_and_stopped(browser: Browser, tmp_path: Path, tiny_moe: Path) -> None:
    configuration = demo(tmp_path)
    file = tmp_path / "job.toml"
    file.write_text(tomli_w.dumps(configuration))
    job = RunningJob(file, tmp_path / "demo")
    tokens = job.output_dir / "serve"
    base = f"http://127.0.0.1:{configuration['serve']['port']}/"
    try:
        lines = job.output_dir / "run_demo" / "metrics.jsonl"
        await asyncio.to_thread(
            job.wait_for, "two steps", lambda: lines.exists() and lines.read_bytes().count(b"\n") >= 2
        )
        async with opened(browser, f"{base}#token=wrong-token-of-nobody-0000") as (page, _):
            dialog = page.get_by_role("dialog")
            await expect(dialog).to_contain_text("The token was refused", timeout=PATIENCE_MILLISECONDS)

        token = (tokens / "admin.token").read_text().strip()
        async with opened(browser, f"{base}#token={token}") as (page, complaints):
            await page.get_by_role("row").filter(has_text="demo").get_by_role("link").click()
            await curves_move(page)
            await a_hostile_rollout_stays_text(page, f"{base}#/jobs/demo/runs/demo/rollouts?environment=hostile")
            await page.goto(f"{base}#/jobs/demo/runs/demo")
            await page.get_by_role("button", name="Stop…").click()
            await page.get_by_role("button", name="Stop the run").click()
            assert await asyncio.to_thread(job.wait) == 143, job.output()
            assert not complaints
            assert await page.title() != "owned"
        assert_nothing_is_left(job)
    finally:
        job.end()


async def curves_move(page: Page) -> None:
    """The chart of the reward reaches a later step than at first."""
    chart = page.locator(".chart").first
    await expect(chart).to_have_attribute("data-range", re.compile(r"^1 \d+"), timeout=PATIENCE_MILLISECONDS)
    before = await chart.get_attribute("data-range")
    await expect(chart).not_to_have_attribute("data-range", before or "", timeout=PATIENCE_MILLISECONDS)


async def a_hostile_rollout_stays_text(page: Page, address: str) -> None:
    """A rollout whose prompt is a script is opened, and shows it."""
    await page.goto(address)
    row = page.get_by_role("row").filter(has_text="hostile").first
    await row.get_by_role("link").first.click()
    await expect(page.locator("main")).to_contain_text(SCRIPT, timeout=PATIENCE_MILLISECONDS)
    assert await page.locator("main script").count() == 0
