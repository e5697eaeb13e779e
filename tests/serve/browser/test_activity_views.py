"""The views of steps, groups and the fleet in a real browser: by keyboard, as a table, and with hostile names as text."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from playwright.async_api import expect

from counterpoint.orchestrator.decisions import Decision, DecisionLog
from counterpoint.transport.telemetry.spans import SPANS_FILE, SpanLog
from tests.serve.activity.jobs import BEGAN, SERVERS, fleet, write_decisions, write_fleet, write_spans
from tests.serve.browser.jobs import HOSTILE
from tests.serve.browser.reader import Reader
from tests.serve.browser.test_accessibility import findings
from tests.support.jobs import write_lines

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="package")]

Open = Callable[..., AbstractAsyncContextManager[Reader]]

RUN = "/jobs/job/runs/one"


def active_job(directory: Path) -> Path:
    """A job whose roles tell what they do, partly in hostile words."""
    write_spans(directory, "one", 6)
    log = SpanLog(directory / "run_one" / SPANS_FILE, "orchestrator", "one")
    log.record(HOSTILE, BEGAN + 52, BEGAN + 53, step=6, run=HOSTILE, note=HOSTILE)
    log.record("serve", BEGAN + 52, BEGAN + 53, step=6, role="inference", server=HOSTILE)
    log.flush()
    write_decisions(directory, "one", 6)
    decisions = DecisionLog(directory / "run_one")
    decisions.of_group(77, Decision.STARTED, environment=HOSTILE, example_index=1, rollouts=4)
    decisions.of_group(77, Decision.DROPPED, reason=HOSTILE, detail=HOSTILE, step=5)
    decisions.flush()
    told = fleet("one")
    told["servers"][1] |= {"state": "out", "reason": HOSTILE}
    write_fleet(directory, "one", told)
    return directory


async def test_a_step_is_drawn_and_used_with_the_keyboard(reader: Open, tmp_path: Path) -> None:
    async with reader(active_job(tmp_path / "job"), path=f"{RUN}/step") as page:
        idle = page.page.locator(".figures .figure")
        await expect(idle.nth(0)).to_contain_text("Orchestrator idle")
        await expect(idle.nth(2)).to_contain_text("50 %")
        await expect(page.page.locator(".gantt-track")).to_have_count(7)
        await page.page.locator(".gantt-track").first.focus()
        await page.page.keyboard.press("ArrowRight")
        await expect(page.page.locator(".gantt-detail")).to_contain_text("generation for 8 s")
        await page.page.keyboard.press("ArrowDown")
        await page.page.keyboard.press("End")
        await expect(page.page.locator("#announcer")).to_contain_text("deliver")
        await page.page.get_by_role("button", name="Table").click()
        await expect(page.page.get_by_role("row", name="optimizer").first).to_be_visible()
        await page.page.keyboard.press("[")
        await expect(page.page.locator(".step-where")).to_contain_text("steps 3 to 5")
        await page.page.get_by_role("button", name="1 step", exact=True).click()
        await expect(page.page.locator(".step-where")).to_contain_text("step 5")
        assert await page.page.evaluate("window.hacked") is None


@pytest.mark.parametrize(("theme", "width"), [("dark", 1280), ("light", 360)])
async def test_groups_and_fleet_say_why(reader: Open, tmp_path: Path, theme: str, width: int) -> None:
    async with reader(active_job(tmp_path / "job"), path=f"{RUN}/groups", theme=theme, width=width) as page:
        await expect(page.page.get_by_role("heading", name="Groups of step 6")).to_be_visible()
        await expect(page.page.locator("table").last).to_contain_text("<script>window.hacked = 1</script>")
        await page.page.get_by_role("button", name="Groups of step 2").click()
        await expect(page.page.get_by_role("heading", name="Groups of step 2")).to_be_visible()
        await expect(page.page.locator("table").last).to_contain_text("too old")
        await expect(page.page.get_by_role("link", name="Read its rollouts")).to_have_attribute(
            "href", f"#{RUN}/rollouts?step=2"
        )
        assert await findings(page) == []
        await page.go("/jobs/job/fleet")
        await expect(page.page.locator("table").first).to_contain_text(SERVERS[0])
        await expect(page.page.locator("tr[data-tone=bad]")).to_contain_text("<script>")
        assert await findings(page) == []
        await page.go(f"{RUN}/step")
        await expect(page.page.locator(".gantt-track").first).to_be_visible()
        assert await findings(page) == []
        assert await page.page.evaluate("window.hacked") is None


async def test_what_processes_take_is_drawn_in_the_view_of_their_job(reader: Open, tmp_path: Path) -> None:
    job = tmp_path / "job"
    (job / "run_one" / "control").mkdir(parents=True)
    lines = [
        {"time": 1e9 + time, "workers": {"trainer": {"cpu": 0.5, "memory": 2**30 * time}}, "gpus": {"0": 0.25}}
        for time in (1, 2, 3)
    ]
    write_lines(job / "usage.jsonl", lines)
    async with reader(
        job, path="/jobs/job", expects_failures=True
    ) as page:  # a job without a file has no servers to list
        await page.wait("() => document.querySelector('[data-connection=connected]')")
        await page.go("/jobs/job")
        memory = page.page.get_by_role("img", name=re.compile("^Memory: trainer now 3.00 GiB, from 1.00 GiB"))
        await expect(memory).to_be_visible()
        await expect(page.page.get_by_role("img", name=re.compile("^GPU in use: 0 now 25 %"))).to_be_visible()
        await expect(page.page.get_by_role("figure", name="GPU memory")).to_have_count(0)
