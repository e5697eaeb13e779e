"""The page as its readers use it: whom it lets in, what it shows of hostile texts, keys, themes and narrow screens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from playwright.async_api import expect

from counterpoint.transport.files.atomic import write_atomically
from tests.serve.api_client import ADMIN, READ
from tests.serve.browser.jobs import append_steps, hostile_job, small_job
from tests.serve.browser.reader import Reader
from tests.support.jobs import write_lines
from tests.support.synthetic_jobs import running

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="package")]

Open = Callable[..., AbstractAsyncContextManager[Reader]]

RUN = "/jobs/job/runs/run-0000"
VIEWS = ("/", "/jobs/job", RUN, f"{RUN}/loop")


async def test_the_overview_shows_each_run_and_leads_to_it(reader: Open, tmp_path: Path) -> None:
    async with reader(small_job(tmp_path / "job")) as page:
        row = page.page.get_by_role("row").filter(has_text="run-0001")
        await expect(row).to_contain_text("40 / 400")
        append_steps(tmp_path / "job", "run-0001", 41, 42)
        await page.ask()
        await expect(row).to_contain_text("42 / 400")
        await row.get_by_role("link").click()
        await expect(page.page.get_by_role("heading", level=1)).to_have_text("run-0001")
        await expect(page.page.get_by_role("navigation", name="Where you are")).to_contain_text("job")


async def test_runs_of_several_jobs_are_one_table_that_sorts(reader: Open, tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    for name, reward in (("a", 0.25), ("b", 0.75), ("c", 0.5)):
        run = small_job(outputs / name, runs=1, steps=3) / "run_run-0000"
        metrics = {"pass@1": {"value": reward, "low": 0, "high": 1}}
        write_lines(run / "evaluations.jsonl", [{"evaluation": "held", "step": 3, "time": 1.0, "metrics": metrics}])
    async with reader(outputs, width=1265) as page:
        rows = page.page.get_by_role("region", name="All runs").locator("tbody tr")
        await expect(rows).to_have_count(3)
        await page.page.get_by_role("button", name="Eval.").click()
        assert [text.split()[0] for text in await rows.all_inner_texts()] == ["b", "c", "a"]
        assert await page.page.evaluate(
            "[...document.querySelectorAll('.table-scroll')].every((box) => box.scrollWidth <= box.clientWidth)"
        )
        await page.page.get_by_label("Filter runs").fill("C/run")
        await expect(rows).to_have_count(1)
        await page.page.get_by_label("Filter runs").fill("")
        await page.page.get_by_role("button", name="Job by job").click()
        await expect(page.page.get_by_role("region", name="Runs of b")).to_be_visible()
        await expect(rows).to_have_count(0)
        assert "by=job" in page.page.url


async def test_a_bad_token_fails_visibly_and_a_good_one_opens(reader: Open, tmp_path: Path) -> None:
    async with reader(small_job(tmp_path / "job"), token="no-token-of-this-server", expects_failures=True) as page:
        dialog = page.page.get_by_role("dialog")
        await expect(dialog).to_contain_text("The token was refused")
        assert await dialog.locator("p.muted").count() == 1, "where the token is, is said once"
        await expect(page.page.get_by_role("row")).to_have_count(0)
        await page.page.get_by_role("textbox", name="Token").fill("another-wrong-token-00000")
        await page.page.get_by_role("button", name="Use this token").click()
        await expect(dialog.get_by_role("alert")).to_contain_text("refused, too")
        await page.page.get_by_role("textbox", name="Token").fill(ADMIN)
        await page.page.keyboard.press("Enter")
        await expect(page.page.get_by_role("row").filter(has_text="run-0000")).to_be_visible()
        assert "token" not in page.page.url


async def test_a_link_with_a_token_pasted_into_the_open_page_logs_in(reader: Open, tmp_path: Path) -> None:
    job = small_job(tmp_path / "job")
    with running(job, []):
        async with reader(job, token="no-token-of-this-server", expects_failures=True) as page:
            await expect(page.page.get_by_role("dialog")).to_contain_text("The token was refused")
            await page.page.evaluate(f"location.hash = '#token={READ}'")
            await expect(page.page.get_by_role("row").filter(has_text="run-0000")).to_be_visible()
            await expect(page.page.get_by_role("dialog")).to_have_count(0)
            assert "token" not in page.page.url
            # Within a view it stays open, with what the new token allows.
            await page.go(RUN)
            await expect(page.page.get_by_role("button", name="Stop…")).to_be_disabled()
            await page.page.evaluate(f"location.hash = '#token={ADMIN}'")
            await expect(page.page.get_by_role("button", name="Stop…")).to_be_enabled()
            assert page.page.url.endswith(f"#{RUN}")


async def test_a_token_that_may_only_read_is_offered_no_change(reader: Open, tmp_path: Path) -> None:
    job = small_job(tmp_path / "job")
    async with reader(job, token=READ, path=RUN) as page:
        await expect(page.page.get_by_role("button", name="Configuration")).to_be_enabled()
        buttons = page.page.get_by_role("group", name="Actions on run run-0000").get_by_role("button")
        await expect(buttons, "no process could do it").to_have_count(0)
        with running(job, []):
            await expect(page.page.get_by_role("button", name="Stop…")).to_be_disabled()


async def test_the_configuration_marks_the_keys_of_the_jobs_file(reader: Open, tmp_path: Path) -> None:
    job = small_job(tmp_path / "job")
    (job / "job.toml").write_text("[orchestrator]\nsteps = 400\n")
    async with reader(job, path=RUN) as page:
        await page.page.get_by_role("button", name="Configuration").click()
        rows = page.page.get_by_role("dialog").get_by_role("row")
        await expect(rows.filter(has_text="in the file; default 100")).to_contain_text("steps400")
        assert await rows.count() > 50
        await page.page.get_by_label("Only keys of the job's file").check()
        await expect(rows.filter(visible=True)).to_have_count(1)


def say_of(job: Path, worker: str, **fields: object) -> None:
    """Lets the supervisor of a job say something else of a worker."""
    processes = job / "processes.json"
    content = json.loads(processes.read_text())
    next(one for one in content["workers"] if one["name"] == worker).update(fields)
    write_atomically(processes, json.dumps(content).encode())


async def test_what_a_run_without_a_step_waits_for_stands_in_place_of_its_charts(reader: Open, tmp_path: Path) -> None:
    job = small_job(tmp_path / "job")
    for run in job.glob("run_*"):
        (run / "metrics.jsonl").unlink()
    (job / "trainer" / "metrics.jsonl").unlink()
    async with reader(job, path=RUN) as page:
        await expect(page.page.get_by_text("No process of this job runs: it is")).to_be_visible()
        assert await page.page.locator(".chart").count() == 0
        with running(job, []):
            say_of(job, "inference_0", state="starting", status="loading <b>")
            await expect(
                page.page.get_by_text(re.compile("waits for inference_0, starting .*loading <b>"))
            ).to_be_visible()
            say_of(job, "trainer", name="orchestrator_another", state="failed", last_death="refused")
            await expect(page.page.get_by_role("row").filter(has_text="refused")).to_be_visible()
            await expect(page.page.get_by_text("waits for inference_0")).to_be_visible()
            say_of(job, "inference_0", state="failed", last_death="exit code 1", last_output="no kernel for 80 heads")
            await expect(page.page.get_by_text("inference_0 failed: exit code 1: no kernel")).to_be_visible()
        append_steps(job, "run-0000", 1, 3)
        await expect(page.page.locator(".chart").first).to_be_visible()
        await expect(page.page.get_by_role("heading", name="Processes")).to_be_hidden()


async def test_a_server_that_is_gone_is_told_with_the_time(reader: Open, tmp_path: Path) -> None:
    async with reader(small_job(tmp_path / "job")) as page:
        page.expects_failures = True
        await page.page.route("**/api/v1/**", lambda route: route.abort())
        for _ in range(4):  # the page waits longer after each failure: half a minute now, and connects when told to
            await page.ask()
        line = page.page.locator("#connection")
        await expect(line).to_contain_text("Not connected since")
        await expect(page.page.get_by_role("row").filter(has_text="run-0000")).to_be_visible()
        await page.page.unroute("**/api/v1/**")
        await line.get_by_role("button", name="Try now").click()
        await expect(line).to_be_empty()


async def test_hostile_texts_stay_text(reader: Open, tmp_path: Path) -> None:
    async with reader(hostile_job(tmp_path / "job"), width=360, height=740) as page:
        for path in VIEWS:
            await page.go(path)
            await page.wait("() => document.querySelector('#view').textContent.includes('<script>')")
            assert await page.page.evaluate("window.hacked ?? null") is None
            assert await page.page.locator("#view script, #view img").count() == 0
            assert await page.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
        await page.go(RUN)
        await page.page.get_by_text("Actions", exact=True).click()
        await page.page.get_by_role("button", name="Configuration").click()
        await expect(page.page.get_by_role("dialog")).to_contain_text("environments")


async def test_no_view_of_a_phone_scrolls_sideways(reader: Open, tmp_path: Path) -> None:
    async with reader(small_job(tmp_path / "job"), width=360, height=740) as page:
        page.expects_failures = True  # a job that never ran has no state to show
        for path in await page.views(job="job", run="run-0001"):
            await page.go(path)
            assert await page.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
        await page.page.get_by_role("button", name="Jobs and runs").click()
        await page.page.get_by_role("navigation", name="Jobs and runs").get_by_role("link", name="run-0001").click()
        await expect(page.page.get_by_role("heading", level=1)).to_contain_text("run-0001")


async def test_keys_alone_are_enough(reader: Open, tmp_path: Path) -> None:
    async with reader(small_job(tmp_path / "job")) as page:
        press = page.page.keyboard.press
        await page.page.reload()
        await page.page.wait_for_selector("[data-connection=connected]")
        await press("Tab")
        await press("Enter")  # the skip link
        await expect(page.page.locator("#main")).to_be_focused()
        await press("?")
        await expect(page.page.get_by_role("dialog")).to_contain_text("Switch the theme")
        await press("Escape")
        await expect(page.page.get_by_role("dialog")).to_have_count(0)
        await press("j")
        await expect(page.page.get_by_role("heading", level=1)).to_have_text("run-0000")
        await page.page.keyboard.type("gl")  # at once: between the two may lie a second and a half
        await expect(page.page.get_by_role("heading", level=1)).to_contain_text("Event loop")
        await press("j")
        await expect(page.page.get_by_role("heading", level=1)).to_contain_text("run-0001")
        await page.page.keyboard.type("go")
        await expect(page.page.get_by_role("heading", level=1)).to_have_text("Overview")
        await press("/")
        await page.page.keyboard.type("run-0001")
        side = page.page.get_by_role("navigation", name="Jobs and runs")
        await expect(side.get_by_role("link", name="run-0000")).to_have_count(0)
        await press("Tab")
        await press("Tab")
        await press("Enter")
        await expect(page.page.get_by_role("heading", level=1)).to_have_text("run-0001")


async def test_focus_and_sorting_survive_updates(reader: Open, tmp_path: Path) -> None:
    async with reader(small_job(tmp_path / "job")) as page:
        heading = page.page.get_by_role("columnheader", name="Run").get_by_role("button")
        await heading.click()
        await heading.click()
        link = page.page.get_by_role("row").filter(has_text="run-0001").get_by_role("link")
        await link.focus()
        append_steps(tmp_path / "job", "run-0001", 41, 41)
        await page.ask()
        await expect(page.page.get_by_role("row").nth(1)).to_contain_text("41 / 400")
        await expect(link).to_be_focused()
        await expect(page.page.get_by_role("columnheader", name="Run")).to_have_attribute("aria-sort", "descending")


async def test_the_theme_follows_the_system_and_the_switch(reader: Open, tmp_path: Path) -> None:
    background = "getComputedStyle(document.body.parentElement).backgroundColor"
    async with reader(small_job(tmp_path / "job"), theme="light") as page:
        light = await page.page.evaluate(background)
        await page.page.emulate_media(color_scheme="dark")
        dark = await page.page.evaluate(background)
        assert light != dark
        await page.page.keyboard.press("t")
        await page.page.keyboard.press("t")  # dark, then light
        assert await page.page.evaluate(background) == light
        await page.page.reload()
        await page.page.wait_for_selector("[data-connection=connected]")
        assert await page.page.evaluate(background) == light
