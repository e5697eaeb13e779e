"""The overview below its table: curves of one run or of several, the newest rollouts, and what to do next."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from playwright.async_api import expect

from counterpoint.environments.chat import Chat
from tests.orchestrator.toy_model import make_toy_model
from tests.serve.browser.jobs import append_steps, small_job
from tests.serve.browser.reader import Reader
from tests.serve.browser.test_accessibility import findings
from tests.serve.browser.test_charts import picture, wait_for_range
from tests.serve.rollouts.jobs import HOSTILE, spoken, write_step
from tests.support.jobs import write_lines

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="package")]

Open = Callable[..., AbstractAsyncContextManager[Reader]]

EVALUATION = {"evaluation": "held", "time": 1.0}


def job_with_rollouts(directory: Path, runs: int) -> Path:
    """A job whose runs have an evaluation, and two rollouts of their newest step, one of them hostile."""
    chat = Chat(make_toy_model(directory.parent / "model"))
    small_job(directory, runs=runs)
    for run in (f"run-{number:04d}" for number in range(runs)):
        results = [
            {**EVALUATION, "step": step, "metrics": {"pass@1": {"value": step / 40, "low": 0, "high": 1}}}
            for step in (0, 20, 40)
        ]
        write_lines(directory / f"run_{run}" / "evaluations.jsonl", results)
        rollouts = [spoken(chat, 7, f"said by {run}", reward=0.25) for _ in range(8)]
        rollouts.append(spoken(chat, 8, HOSTILE * 20, reward=-1.0, environment=HOSTILE))
        write_step(directory, run, 40, rollouts, chat)
    return directory


@pytest.mark.parametrize(("theme", "width"), [("dark", 1280), ("light", 360)])
async def test_a_single_run_has_its_curves_and_rollouts(reader: Open, tmp_path: Path, theme: str, width: int) -> None:
    async with reader(job_with_rollouts(tmp_path / "job", 1), theme=theme, width=width) as page:
        await wait_for_range(page, "least === 0 && greatest === 40")
        titles = page.page.locator(".chart-title")
        await expect(titles).to_have_text(["held: pass@1", "Reward", "Mismatch KL", "Loop lag"])
        await expect(page.page.get_by_role("button", name="Choose runs…")).to_be_hidden()
        append_steps(tmp_path / "job", "run-0000", 41, 60)
        await page.ask()
        await wait_for_range(page, "greatest === 60")
        following = page.page.get_by_role("list", name="What to do next")
        await expect(following.get_by_role("code")).to_have_text(["counterpoint run FILE --resume"])
        lines = page.page.get_by_role("list", name="Newest rollouts").get_by_role("listitem")
        await expect(lines).to_have_count(6)
        await expect(
            lines.filter(has_text="<script>"), "of each group one stands before more of another"
        ).to_have_count(1)
        await expect(lines.filter(has_text="<script>").first).to_contain_text("\N{MINUS SIGN}1")
        assert await page.page.evaluate("window.hacked ?? null") is None
        assert await page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert await findings(page) == []
        await lines.filter(has_text="said by").first.get_by_role("link", name="Step 40").click()
        await expect(page.page.locator(".turns")).to_contain_text("said by run-0000")


async def test_runs_are_chosen_and_lie_over_each_other_by_name(reader: Open, tmp_path: Path) -> None:
    job_with_rollouts(tmp_path / "job", 6)
    other = small_job(tmp_path / "other", runs=1, steps=20)
    async with reader(tmp_path / "job", other) as page:
        compared = page.page.get_by_role("list", name="Runs that are compared").get_by_role("listitem")
        await expect(compared).to_have_count(4)
        await page.page.get_by_role("button", name="Choose runs…").click()
        dialog = page.page.get_by_role("dialog")
        checked = dialog.get_by_role("checkbox", checked=True)
        while await checked.count():
            await checked.first.uncheck()
        await dialog.get_by_label("run-0005").check()
        await dialog.get_by_label("run-0000 other").check()
        await dialog.get_by_role("button", name="Compare", exact=True).click()
        names = ["job/run-0005", "other/run-0000"]
        await expect(compared).to_have_count(2)
        reward = picture(page, "Reward")
        await expect(reward).to_have_attribute("aria-label", re.compile(f"{names[0]} now.*{names[1]} now"))
        legend = page.page.get_by_role("figure", name="Loop lag").locator(".legend .name")
        await expect(legend).to_have_text(names)
        await expect(page.page.get_by_role("list", name="Newest rollouts")).to_contain_text("said by run-0005")
        await page.page.reload()
        await expect(reward).to_have_attribute("aria-label", re.compile(f"{names[0]} now.*{names[1]} now"))
        assert await findings(page) == []
