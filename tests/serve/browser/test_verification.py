"""The mark of a run's receipts in a real browser: asked for by a button, with what was checked, or the damage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.serve.browser.reader import Reader
from tests.serve.browser.test_accessibility import findings
from tests.verify.recorded import RecordedRun, config_of

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="package")]

Open = Callable[..., AbstractAsyncContextManager[Reader]]


async def test_a_run_is_verified_by_a_button_and_damage_is_named(reader: Open, tmp_path: Path) -> None:
    config = config_of(tmp_path / "job")
    config.output_dir.mkdir()
    await asyncio.to_thread(RecordedRun(config).play, 3)
    async with reader(config.output_dir, path="/jobs/job/runs/one") as page:
        button, dialog = page.page.get_by_role("button", name="Verify"), page.page.get_by_role("dialog")
        await button.click()
        await expect(dialog).to_contain_text("Receipts of one: sound")
        await expect(dialog).to_contain_text("records of steps: 3")
        assert await findings(page) == []
        await page.page.keyboard.press("Escape")
        await expect(page.page.get_by_text("verified, 3 receipts")).to_be_visible()
    (config.run_dir / "rollouts" / "step_2" / "rollouts.jsonl").unlink()
    async with reader(config.output_dir, path="/jobs/job/runs/one") as page:
        await page.page.get_by_role("button", name="Verify").click()
        await expect(page.page.get_by_role("dialog")).to_contain_text("rollouts/step_2/rollouts.jsonl")
        await page.page.keyboard.press("Escape")
        await expect(page.page.locator(".view-title").get_by_text("damaged")).to_be_visible()
