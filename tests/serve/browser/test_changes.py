"""The buttons that change a run: each asks first, what the server refuses is shown, and what was done is seen in the page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import orjson
import pytest
from playwright.async_api import expect

from counterpoint.job.admin.verbs import RUN_VERBS
from counterpoint.run.pause import Pause, remove_pause, write_pause
from counterpoint.transport.files.atomic import write_atomically
from tests.serve.browser.jobs import HOSTILE, small_job
from tests.serve.browser.reader import Reader
from tests.support.polling import wait_until
from tests.support.synthetic_jobs import running

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="package")]

Open = Callable[..., AbstractAsyncContextManager[Reader]]

RUN = "/jobs/job/runs/run-0000"


@pytest.fixture
def live_job(tmp_path: Path) -> Iterator[Path]:
    """A job whose runs seem to run, in this process: nobody may stop them."""
    job = small_job(tmp_path / "job")
    with running(job, ["run-0000", "run-0001"]):
        yield job


async def answer_request(run_dir: Path, **answer: object) -> dict[str, object]:
    """Answers the next request to a run, as its orchestrator would. Returns the request."""
    return await asyncio.to_thread(_answer, run_dir / "control", answer)


def _answer(control: Path, answer: dict[str, object]) -> dict[str, object]:
    wait_until(lambda: any(control.glob("requests/*.json")), "a request to the run")
    [path] = control.glob("requests/*.json")
    request: dict[str, object] = orjson.loads(path.read_bytes())
    (control / "answers").mkdir(exist_ok=True)
    content = orjson.dumps({"request_id": request["request_id"], "outcome": "done", **answer})
    write_atomically(control / "answers" / path.name, content)
    return request


async def test_eviction_asks_for_a_reason_and_is_then_a_problem(reader: Open, tmp_path: Path) -> None:
    job = small_job(tmp_path / "job")
    with running(job, []):
        async with reader(job, path=RUN) as page:
            evict = page.page.get_by_role("button", name="Evict…")
            await evict.click()
            await page.page.keyboard.press("Escape")
            await expect(evict).to_be_focused()
            assert not (job / "run_run-0000" / "control" / "evicted.txt").exists()
            await evict.click()
            await page.page.get_by_label("Reason").fill(HOSTILE)
            await page.page.get_by_role("button", name="Evict the run").click()
            await expect(page.page.get_by_role("dialog")).to_have_count(0)
            assert "<script>" in (job / "run_run-0000" / "control" / "evicted.txt").read_text()
            await expect(page.page.get_by_role("list", name="Problems")).to_contain_text("<script>")
            assert await page.page.evaluate("window.hacked ?? null") is None


async def test_a_value_is_changed_and_a_wrong_one_is_shown(reader: Open, live_job: Path) -> None:
    async with reader(live_job, path=RUN) as page:
        await page.page.get_by_role("button", name="Change…").click()
        dialog = page.page.get_by_role("dialog")
        value = dialog.get_by_label("sampling.temperature")
        await value.fill("warm")
        await dialog.get_by_role("button", name="Change", exact=True).click()
        await expect(dialog.get_by_role("alert")).to_contain_text("sampling.temperature cannot have this value")
        await value.fill("0.5")
        await expect(dialog.get_by_role("status")).to_contain_text("→ 0.5")
        await dialog.get_by_role("button", name="Change", exact=True).click()
        request = await answer_request(live_job / "run_run-0000", step=41)
        assert request["changes"] == {"sampling.temperature": 0.5}
        await expect(page.page.locator(".toast").last).to_contain_text("from step 41 on")


@pytest.mark.promise("a run is watched and changed in a browser")
async def test_a_pause_reaches_the_run_with_its_reason(reader: Open, live_job: Path) -> None:
    async with reader(live_job, path=RUN) as page:
        await page.page.get_by_role("button", name="Pause…").click()
        await page.page.get_by_label("Reason").fill("look at step 40")
        await page.page.get_by_role("button", name="Pause", exact=True).click()
        request = await answer_request(live_job / "run_run-0000", step=40)
        assert (request["kind"], request["reason"]) == ("pause", "look at step 40")
        await expect(page.page.locator(".toast").last).to_contain_text("run-0000 is paused")


async def test_what_is_offered_follows_the_run_and_a_verb_that_asks_nothing_acts_at_once(
    reader: Open, live_job: Path
) -> None:
    run_dir = live_job / "run_run-0000"
    write_pause(run_dir, Pause(since=1.0, reason="look at step 40"))
    async with reader(live_job, path=RUN) as page:
        buttons = page.page.get_by_role("group", name="Actions on run run-0000").get_by_role("button")
        offered = [verb for verb in RUN_VERBS if verb.when in ("", "paused")]
        await expect(buttons).to_have_text([f"{verb.label}{'…' * verb.asks_first}" for verb in offered])
        await page.page.get_by_role("button", name="Resume").click()
        request = await answer_request(run_dir, step=40)
        assert request["kind"] == "resume"
        await expect(page.page.locator(".toast").last).to_contain_text("run-0000 goes on")
        remove_pause(run_dir)
        await page.ask()
        await expect(page.page.get_by_role("button", name="Resume")).to_be_hidden()
        await expect(page.page.get_by_role("button", name="Pause…")).to_be_visible()


async def test_a_number_reaches_the_run_as_a_number(reader: Open, live_job: Path) -> None:
    async with reader(live_job, path=RUN) as page:
        await page.page.get_by_role("button", name="Profile…").click()
        await page.page.get_by_role("spinbutton", name="Seconds").fill("0.5")
        await page.page.get_by_role("button", name="Profile", exact=True).click()
        assert (await answer_request(live_job / "run_run-0000", step=40))["seconds"] == 0.5
        await expect(page.page.get_by_role("link", name="See its flame graph")).to_be_visible()


async def test_a_server_is_added_drained_and_taken_away(reader: Open, live_job: Path) -> None:
    async with reader(live_job, path="/jobs/job") as page:
        await page.page.get_by_role("button", name="Add a server…").click()
        await page.page.get_by_label("URL").fill("http://127.0.0.1:9")
        await page.page.get_by_role("button", name="Add a server", exact=True).click()
        row = page.page.get_by_role("row").filter(has_text="http://127.0.0.1:9")
        await row.get_by_role("button", name="Drain").click()
        await expect(row).to_contain_text("drained")
        await expect(row.get_by_role("button", name="Drain")).to_be_hidden()
        await row.get_by_role("button", name="Give requests").click()
        await expect(row.get_by_role("button", name="Drain")).to_be_visible()
        await row.get_by_role("button", name="Take away").click()
        await expect(row).to_have_count(0)


async def test_a_refusal_says_why(reader: Open, live_job: Path) -> None:
    async with reader(live_job, path=RUN) as page:
        page.expects_failures = True
        await page.page.get_by_role("button", name="Checkpoint").click()
        await page.page.get_by_role("button", name="Checkpoint", exact=True).last.click()
        await answer_request(live_job / "run_run-0000", outcome="refused", reason="the run has no durable step yet")
        await expect(page.page.get_by_text("the run has no durable step yet").first).to_be_visible()


async def test_a_note_that_matters_stays_until_it_is_closed(reader: Open, live_job: Path) -> None:
    async with reader(live_job, path=RUN) as page:
        notes = page.page.locator(".toast")
        await page.page.clock.install()
        await page.page.evaluate(
            """import("./widgets/dialog.js").then(({ toast }) => {
                 toast("it refuses", "bad");
                 for (const run of "1234") toast(`run ${run} is paused`);
               })"""
        )
        await expect(notes).to_have_text(["it refuses\u00d7", *(f"run {run} is paused\u00d7" for run in "234")])
        await page.page.clock.run_for(60_000)
        await expect(notes).to_have_text(["it refuses\u00d7"])
        await page.page.get_by_role("button", name="Close this note").click()
        await expect(notes).to_have_count(0)
