"""What a reader can tell apart: long names, phases of a role, numbers, repeated lines; and that a table goes on to the right."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from playwright.async_api import expect

from counterpoint.transport.files.lock import take_lock
from tests.serve.activity.jobs import fleet, write_decisions, write_fleet, write_spans
from tests.serve.browser.jobs import small_job
from tests.serve.browser.reader import Reader
from tests.support.jobs import trained_line, write_lines
from tests.support.synthetic_jobs import running

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="package")]

Open = Callable[..., AbstractAsyncContextManager[Reader]]

RUN = "/jobs/job/runs/run-0000"
SWEEP = ("demo.learning_rate-0.0003__seed-1", "demo.learning_rate-0.0003__seed-2")

ENDS = """selector => [...document.querySelectorAll(selector)].map((end) => {
    const [inner, outer] = [end.getBoundingClientRect(), end.closest("td, a").getBoundingClientRect()];
    return [end.textContent, end.scrollWidth <= end.clientWidth && inner.right <= outer.right + 1];
})"""
"""The ends of names, and whether all of each is inside of its cell or link."""

STYLES = """() => [...document.querySelectorAll(".gantt-legend-line")].map((line) =>
    [...line.querySelectorAll(".gantt-key")].map((key) => [key.textContent, key.firstChild.dataset.style]))"""
"""For each line of the legend, what has which style."""


def change_lines(job: Path, run: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes each of a run's lines of metrics."""
    file = job / f"run_{run}" / "metrics.jsonl"
    lines = [orjson.loads(line) for line in file.read_bytes().splitlines()]
    for line in lines:
        change(line)
    file.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


@pytest.mark.parametrize("width", [1280, 360])
async def test_names_that_differ_at_their_end_look_different(reader: Open, tmp_path: Path, width: int) -> None:
    job = small_job(tmp_path / "job")
    for number, name in enumerate(SWEEP):
        (job / f"run_run-000{number}").rename(job / f"run_{name}")
        change_lines(job, name, lambda line, name=name: line | {"run_id": name})  # type: ignore[misc]
    async with reader(job, width=width) as page:
        for places in ("td .name-end", "a.side-run .name-end") if width > 640 else ("td .name-end",):
            await expect(page.page.locator(places, has_text="seed")).to_have_count(2)
            ends = [end for end in await page.page.evaluate(ENDS, places) if "seed" in end[0]]
            assert len({text for text, _ in ends}) == 2
            assert all(is_whole for _, is_whole in ends), ends
        await expect(page.page.locator("td .name", has_text="seed-1")).to_have_text(SWEEP[0])
        await page.go(f"/jobs/job/runs/{SWEEP[0]}")
        end = page.page.locator(".crumbs > :last-child .name-end, .crumbs > .name:last-child .name-end").last
        box, line = await end.bounding_box(), await page.page.locator(".crumbs").bounding_box()
        assert box is not None
        assert line is not None
        assert box["x"] + box["width"] <= line["x"] + line["width"] + 1


async def test_the_name_of_a_job_is_whole_beside_room(reader: Open, tmp_path: Path) -> None:
    jobs = [small_job(tmp_path / name, runs=1) for name in ("reverse-text-of-the-tutorial", "other")]
    async with reader(*jobs, width=1600) as page:
        begin = page.page.locator("td[data-title=Job] .name-begin").filter(has_text="reverse")
        await expect(begin).to_have_count(1)
        assert await begin.evaluate("node => node.scrollWidth <= node.clientWidth")


async def test_how_long_ago_a_step_was_is_not_cut(reader: Open, tmp_path: Path) -> None:
    job = small_job(tmp_path / "job", runs=1)
    for seconds, said in ((5_100, "1 h ago"), (3_000, "50 min ago"), (40 * 86_400, "40 d ago")):
        now = time.time()
        change_lines(job, "run-0000", lambda line, at=now - seconds: line.update({"time": at}))  # type: ignore[misc]
        async with reader(job) as page:
            cell = page.page.locator("td[data-title=Updated]")
            await expect(cell).to_have_text(said)
            assert await cell.evaluate("cell => cell.scrollWidth <= cell.clientWidth")


async def test_no_two_phases_of_a_role_share_a_colour(reader: Open, tmp_path: Path) -> None:
    job = small_job(tmp_path / "job", steps=6)
    write_spans(job, "run-0000", 6)
    async with reader(job, path=f"{RUN}/step") as page:
        await expect(page.page.locator(".gantt-legend-line")).to_have_count(3)
        for keys in await page.page.evaluate(STYLES):
            styles = [style for _, style in keys]
            assert styles
            assert len({*styles}) == len(styles), keys


async def test_header_and_charts_have_the_same_numbers(reader: Open, tmp_path: Path) -> None:
    async with reader(small_job(tmp_path / "job"), path=RUN) as page:
        chart = page.page.get_by_role("figure", name="Tokens generated per second")
        await expect(chart.locator(".chart-value")).not_to_be_empty()
        value = await chart.locator(".chart-value").inner_text()
        await expect(page.page.locator(".figure", has_text="Tokens generated").locator("dd")).to_contain_text(value)
        answer = await page.client.get("/overview")
        rate = answer[1]["runs"][0]["tokens_per_second"]
        assert value == f"{rate:,.0f}", "the chart's newest value, the header's and the overview's"
        await expect(page.page.get_by_role("figure", name="Tokens trained per second")).to_be_visible()
        await expect(page.page.locator(".view-title")).to_contain_text("newest step")


async def test_the_same_problem_of_several_runs_is_one(reader: Open, tmp_path: Path) -> None:
    job = small_job(tmp_path / "job", runs=4)
    for number in range(4):
        (job / f"run_run-000{number}" / "control" / "evicted.txt").write_text("its samples are too long")
    async with reader(job) as page:
        problem = page.page.locator(".problem", has_text="too long")
        await expect(problem).to_have_count(1)
        await expect(problem.locator(".problem-others a")).to_have_count(3)


async def test_the_same_problem_with_other_numbers_is_one_and_another_reason_is_another(
    reader: Open, tmp_path: Path
) -> None:
    job = small_job(tmp_path / "job", runs=3)
    for number, reason in enumerate(("nan at step 41", "nan at step 42", "too long")):
        (job / f"run_run-000{number}" / "control" / "evicted.txt").write_text(reason)
    async with reader(job) as page:
        await expect(page.page.locator(".problem")).to_have_count(2)
        await expect(page.page.locator(".problem", has_text="nan").locator(".problem-others a")).to_have_count(1)


async def test_a_problem_of_rollouts_leads_to_the_worst_of_them(reader: Open, tmp_path: Path) -> None:
    job = small_job(tmp_path / "job", runs=1)
    change_lines(job, "run-0000", lambda line: line.update({"rollouts/failed": 100}))
    with running(job, ["run-0000"]):
        async with reader(job, path="/jobs/job/runs/run-0000") as page:
            problem = page.page.locator(".problem", has_text="rollouts")
            await problem.get_by_role("link", name="See its worst rollouts").click()
            await expect(page.page.get_by_role("heading", level=1)).to_have_text("Rollouts")
            await expect(page.page.get_by_label("Sort by")).to_have_value("worst")


async def test_servers_of_a_job_that_has_ended_are_no_alarm(reader: Open, tmp_path: Path) -> None:
    job = small_job(tmp_path / "job")
    told = fleet("run-0000")
    told["servers"][0] |= {"state": "out", "reason": "the pool was closed"}
    write_fleet(job, "run-0000", told)
    async with reader(job, path="/jobs/job/fleet") as page:
        row = page.page.get_by_role("row").filter(has_text="the pool was closed")
        await expect(row.locator(".badge")).to_have_attribute("data-tone", "idle")
        assert await row.get_attribute("data-tone") is None


async def test_late_moments_without_code_to_blame_are_one_row(reader: Open, tmp_path: Path) -> None:
    job = small_job(tmp_path / "job", runs=1, steps=12)
    blame = {"kind": "machine", "seconds": 0.2, "worst": 0.2, "count": 1}
    change_lines(job, "run-0000", lambda line: line.update({"event_loop_lag/max": 0.2, "event_loop_blame": [blame]}))
    async with reader(job, path=f"{RUN}/loop") as page:
        rows = page.page.locator("table").first.locator("tbody tr")
        await expect(rows).to_have_count(1)
        await expect(rows.first).to_contain_text("and 11 more")


async def test_on_a_phone_a_table_shows_that_it_scrolls_and_filters_fold(reader: Open, tmp_path: Path) -> None:
    write_decisions(job := small_job(tmp_path / "job"), "run-0000", 3)
    async with reader(job, path=f"{RUN}/groups", width=360) as page:
        table = page.page.locator(".table").first
        await expect(table).to_have_attribute("data-more", "")
        await table.locator(".table-scroll").evaluate("box => { box.scrollLeft = box.scrollWidth }")
        await expect(table).not_to_have_attribute("data-more", "")
        await page.go(f"{RUN}/rollouts")
        filters = page.page.get_by_label("Outcome", exact=True)
        await expect(filters).to_be_hidden()
        await page.page.get_by_text("Filters and search").click()
        await expect(filters).to_be_visible()


async def test_where_two_configurations_differ_is_shown(reader: Open, tmp_path: Path) -> None:
    job = small_job(tmp_path / "job")
    for number in range(2):
        control = job / f"run_run-000{number}" / "control"
        (control / "orch.toml").write_text(
            f'run_id = "run-000{number}"\n[training]\nlearning_rate = 1e-{number + 3}\nseed = 1\n'
        )
    async with reader(job, path=f"{RUN}?with=job~run-0001") as page:
        await page.page.get_by_role("button", name="Configuration").click()
        differences = page.page.get_by_role("region", name="Where the runs differ")
        await expect(differences.locator("tbody tr")).to_have_count(1)
        await expect(differences).to_contain_text("training.learning_rate")


async def test_a_log_is_read_and_followed(reader: Open, tmp_path: Path) -> None:
    job = small_job(tmp_path / "job")
    (job / "trainer.log").write_text("one line\n<script>window.hacked = 1</script>\n")
    async with reader(job, path="/jobs/job/logs?name=trainer") as page:
        await expect(page.page.get_by_role("region", name="The end of the log")).to_contain_text("<script>")
        with (job / "trainer.log").open("a") as file:
            file.write("another line\n")
        await expect(page.page.get_by_role("region", name="The end of the log")).to_contain_text("another line")


async def test_ticks_are_in_the_units_of_their_labels(reader: Open, tmp_path: Path) -> None:
    small_job(tmp_path / "job", runs=1, steps=3)
    ticks = """import("./widgets/chart_series.js").then(async ({ BYTE_STEPS, tickOf }) => {
        const { bytes, roughly, seconds } = await import("./shell/format.js");
        return [
            [2 ** 29, 2 ** 30, 3 * 2 ** 29].map((value) => [BYTE_STEPS.includes(2 ** 29), tickOf(value, 2 ** 29, bytes)]),
            [0, 0.5, 1, 1.5, 2].map((value) => tickOf(value, 0.5, seconds)),
            [0.001, 0.002].map((value) => tickOf(value, 0.001, seconds)),
            [40, 1000, 11400, 216000].map(roughly),
        ];
    })"""
    async with reader(tmp_path / "job") as page:
        assert await page.page.evaluate(ticks) == [
            [[True, "512 MiB"], [True, "1 GiB"], [True, "1.50 GiB"]],
            ["0 s", "0.5 s", "1.0 s", "1.5 s", "2.0 s"],
            ["1 ms", "2 ms"],
            ["40 s", "17 min", "3.2 h", "2.5 d"],
        ]


async def test_a_row_is_a_block_on_a_phone_and_names_its_values(reader: Open, tmp_path: Path) -> None:
    job = small_job(tmp_path / "job", runs=1)
    async with reader(job, width=390) as page:
        row = page.page.locator("tr", has=page.page.get_by_role("link", name="run-0000"))
        for title in ("Step", "Reward", "Staleness", "Updated"):
            cell = row.locator(f"td[data-title={title}]")
            await expect(cell).to_be_in_viewport()
            assert title in await cell.evaluate("cell => getComputedStyle(cell, '::before').content")
        await expect(row.locator("td[data-title='Time left']")).to_be_hidden()  # nothing is known of it


async def test_a_server_of_a_job_that_has_ended_is_stopped(reader: Open, tmp_path: Path) -> None:
    job = small_job(tmp_path / "job", runs=1)
    run = ["run-0000"]
    with running(job, run):
        async with reader(job, path="/jobs/job") as page:
            await expect(page.page.get_by_text("not in use yet")).to_be_visible()
    async with reader(job, path="/jobs/job") as page:
        servers = page.page.get_by_role("region", name="Servers")
        await expect(servers.locator("td[data-title=State]")).to_contain_text("stopped")
        await expect(page.page.get_by_text("not in use yet")).to_have_count(0)


@contextmanager
def closing_lock(path: Path) -> Iterator[None]:
    """Holds the lock of a directory, as the command does that trains there."""
    lock = take_lock(path, "taken")
    try:
        yield
    finally:
        os.close(lock)


async def test_a_job_in_its_fine_tuning_says_how_far_it_is_and_leads_to_its_loss(reader: Open, tmp_path: Path) -> None:
    job = small_job(tmp_path / "job", runs=1, steps=3)
    for metrics in (job / "run_run-0000", job / "trainer"):
        (metrics / "metrics.jsonl").unlink()
    settings = orjson.loads((job / "job.json").read_bytes())
    (job / "job.json").write_bytes(orjson.dumps(settings | {"sft": {}}))
    tuned = job / "sft" / "run_sft"
    (tuned / "control").mkdir(parents=True)
    (tuned / "control" / "orch.toml").write_text("steps = 60\n")
    (tuned / "sft.json").write_text("{}")
    write_lines(job / "sft" / "trainer" / "metrics.jsonl", [trained_line(step, "sft") for step in range(1, 13)])
    with running(job, []), closing_lock(job / "sft" / "job.lock"):
        async with reader(job, path=RUN, expects_failures=True) as page:
            await page.page.wait_for_selector("[data-connection=connected]")
            await page.go(RUN)
            await expect(page.page.get_by_role("status").filter(has_text="step 12 of 60, loss 0.1")).to_be_visible()
            await page.page.get_by_role("link", name="See its loss").click()
            await expect(page.page.get_by_role("figure", name="Loss")).to_be_visible()
            await expect(page.page.locator(".figure").first).to_contain_text("12")
            await expect(page.page.get_by_role("button", name="Stop")).to_have_count(0)
