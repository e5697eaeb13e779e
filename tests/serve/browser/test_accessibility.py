"""axe finds nothing serious in any view, in either theme, on a wide screen and on a phone, and in dialogs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import expect

from tests.serve.browser.jobs import hostile_job, small_job
from tests.serve.browser.reader import Reader

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="package")]

Open = Callable[..., AbstractAsyncContextManager[Reader]]

RUN = "/jobs/job/runs/run-0001"
AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text()


async def findings(page: Reader, part: str = "html") -> list[str]:
    """Serious and critical findings of axe in a part of the page."""
    if not await page.page.evaluate("typeof axe !== 'undefined'"):
        await page.page.evaluate(AXE)
    found: dict[str, Any] = await page.page.evaluate("part => axe.run(part, { resultTypes: ['violations'] })", part)
    return [
        f"{violation['id']}: {node['target']} {node['failureSummary']}"
        for violation in found["violations"]
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"][:3]
    ]


@pytest.mark.parametrize(("theme", "width"), [("dark", 1280), ("light", 360)])
async def test_no_view_has_a_serious_finding(reader: Open, tmp_path: Path, theme: str, width: int) -> None:
    async with reader(hostile_job(tmp_path / "job"), theme=theme, width=width) as page:
        page.expects_failures = True  # a job that never ran has no state to show
        views = await page.views(job="job", run="run-0001")
        assert len(views) > 3
        for path in views:
            await page.go(path)
            await expect(page.page.get_by_role("heading", level=1)).to_be_visible()
            assert await findings(page) == [], path


async def test_no_dialog_has_a_serious_finding(reader: Open, tmp_path: Path) -> None:
    async with reader(small_job(tmp_path / "job"), path=RUN, theme="light") as page:
        for name in ("Compare with…", "Show the keys"):
            await page.page.get_by_role("button", name=name).click()
            await expect(page.page.get_by_role("dialog")).to_be_visible()
            assert await findings(page, "dialog") == [], name
            await page.page.keyboard.press("Escape")
            await expect(page.page.get_by_role("dialog")).to_have_count(0)


async def test_axe_finds_what_is_wrong(reader: Open, tmp_path: Path) -> None:
    async with reader(small_job(tmp_path / "job")) as page:
        await page.page.evaluate("document.querySelector('main').append(document.createElement('button'))")
        assert any("button-name" in finding for finding in await findings(page))
