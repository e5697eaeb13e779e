"""The flame graph in a real browser: zoomed and walked by keyboard and by pointer, searched, as a table, with hostile names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.serve.browser.jobs import HOSTILE, LONG, small_job
from tests.serve.browser.reader import Reader
from tests.serve.browser.test_accessibility import findings
from tests.serve.test_profiles_api import content_of, write_profile
from tests.support.synthetic_jobs import running

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="package")]

Open = Callable[..., AbstractAsyncContextManager[Reader]]

RUN = "/jobs/job/runs/one"


def profiled_job(directory: Path) -> Path:
    """A job of a run with two profiles, whose names of functions are hostile, too."""
    small_job(directory, runs=1, steps=5)
    (directory / "run_run-0000").rename(directory / "run_one")
    step, merge = "Loop.step (orchestrator/loop.py:10)", "merge (orchestrator/merge.py:20)"
    write_profile(directory, "old", content_of((["(waiting)"], 3.0)), time=1000.0)
    stacks = (
        ([step, merge, "parse (orjson/a.py:1)"], 4.0),
        ([step, merge], 1.0),
        ([step, f"{HOSTILE} ({HOSTILE}:7)"], 2.0),
        (["(waiting)"], 2.0),
        ([LONG], 1.0),
    )
    write_profile(directory, "new", content_of(*stacks))
    return directory


@pytest.mark.parametrize(("theme", "width"), [("dark", 1280), ("light", 360)])
async def test_a_profile_is_seen_as_a_flame_graph(reader: Open, tmp_path: Path, theme: str, width: int) -> None:
    async with reader(profiled_job(tmp_path / "job"), path=f"{RUN}/loop", theme=theme, width=width) as page:
        await page.page.get_by_role("link", name="Profiles of the loop").click()
        await expect(page.page.get_by_role("heading", level=1)).to_contain_text("Profiles of one")
        boxes, detail = page.page.locator(".flame-box"), page.page.locator(".flame-detail")
        await expect(boxes).to_have_count(7)
        assert await findings(page) == []

        await boxes.first.focus()
        await page.page.keyboard.press("ArrowDown")
        await expect(detail).to_contain_text("Loop.step: orchestrator/loop.py:10, 7 s, 70 % of the profile")
        await page.page.keyboard.press("ArrowRight")
        await expect(detail).to_contain_text("(waiting): 2 s, 20 %")
        await page.page.keyboard.press("ArrowLeft")
        await page.page.keyboard.press("ArrowDown")
        await page.page.keyboard.press("Enter")
        merge = page.page.get_by_role("treeitem", name="merge: orchestrator/merge.py:20, 5 s, 50 %")
        await expect(merge).to_be_focused()
        await expect(boxes).to_have_count(4)  # its callers, it, and what it called
        ratio = "box => box.offsetWidth / box.parentElement.offsetWidth"
        assert await merge.evaluate(ratio) == pytest.approx(1.0, abs=0.02)
        await page.page.keyboard.press("Escape")
        await expect(boxes).to_have_count(7)
        assert await merge.evaluate(ratio) == pytest.approx(0.5, abs=0.02)

        await page.page.get_by_role("searchbox", name="Find a function or file").fill("orchestrator/")
        await expect(page.page.get_by_text("2 frames match: 70 % of the time")).to_be_visible()
        await expect(page.page.locator(".flame-box[data-match]")).to_have_count(2)
        await page.page.get_by_role("treeitem", name=":7, 2 s, 20 %").click()
        await expect(detail).to_contain_text("<script>window.hacked = 1</script>")
        await page.page.get_by_role("button", name="Whole profile").click()
        await page.page.get_by_role("button", name="Table").click()
        await expect(page.page.get_by_role("row", name="parse").first).to_contain_text("40 %")
        assert await findings(page) == []

        await page.page.get_by_label("Which profile").select_option("old")
        await expect(boxes).to_have_count(2)
        assert "profile=old" in await page.page.evaluate("location.hash")
        assert await page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert await page.page.evaluate("window.hacked") is None


async def test_the_note_of_a_new_profile_leads_to_its_graph(reader: Open, tmp_path: Path) -> None:
    job = profiled_job(tmp_path / "job")
    with running(job, []):
        async with reader(job, path=RUN) as page:
            taken = {"run_id": "one", "sentence": "3 s of run one", "name": "old", "seconds": 3.0}
            await page.page.route("**/runs/one/profile", lambda route: route.fulfill(json=taken))
            await page.page.get_by_role("button", name="Profile…").click()
            await page.page.get_by_role("dialog").get_by_role("button", name="Profile").click()
            await page.page.get_by_role("link", name="See its flame graph").click()
            await expect(page.page.get_by_role("treeitem", name="(waiting): 3 s, 100 %")).to_be_visible()
            assert await page.page.evaluate("location.hash") == f"#{RUN}/profiles?profile=old"
