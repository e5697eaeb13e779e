"""The views of rollouts, populations, sweeps and clusters in a browser: what they show, and that hostile text stays text."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from playwright.async_api import expect

from counterpoint.environments.chat import Chat
from counterpoint.models import write_tokenizer
from counterpoint.sweep.lock import step_lock
from tests.orchestrator.toy_model import make_toy_model
from tests.serve.browser.reader import Reader
from tests.serve.browser.test_accessibility import findings
from tests.serve.rollouts.jobs import OF_TURNS, name_model, spoken, write_step
from tests.serve.test_cluster_api import Master
from tests.serve.test_population_api import experiment, trial, write_results
from tests.serve.test_tenants_api import write_service
from tests.support.conversations import PROMPTS, hostile
from tests.support.polling import DEADLINE_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="package")]

Open = Callable[..., AbstractAsyncContextManager[Reader]]

HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked=1'>\u202eevil\x1b[2J"

ROLLOUTS = "/jobs/job/runs/one/rollouts"


def job_with_rollouts(directory: Path) -> Path:
    """A job of a run with three steps of rollouts, of which the last holds a hostile one."""
    directory.mkdir()
    model = make_toy_model(directory.parent / "model")
    name_model(directory, model)
    chat = Chat(model)
    for step in (1, 2, 3):
        rollouts = [spoken(chat, 7, f"attempt {step}", reward=step / 10), spoken(chat, 8, "fine", reward=0.9)]
        if step == 3:
            rollouts.append(spoken(chat, 9, HOSTILE, "again", reward=-1.0, error=HOSTILE, environment=HOSTILE))
        write_step(directory, "one", step, rollouts, chat)
    return directory


async def stays_text(page: Reader) -> None:
    assert await page.page.evaluate("window.hacked ?? null") is None
    assert await page.page.locator("#view script, #view img").count() == 0
    assert await page.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert await findings(page) == []


async def test_a_long_completion_leaves_the_right_answer_in_sight(reader: Open, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    model = make_toy_model(tmp_path / "model")
    name_model(tmp_path / "job", model)
    chat = Chat(model)
    write_step(tmp_path / "job", "one", 1, [spoken(chat, 7, "on and on " * 60, reward=0.5, answer="forty-two")], chat)
    async with reader(tmp_path / "job", path=ROLLOUTS) as page:
        cell = page.page.locator("td[data-title=Beginning]")
        await expect(cell).to_contain_text("on and on")
        answer = await cell.get_by_text("right: forty-two").bounding_box()
        box = await cell.bounding_box()
        assert answer is not None
        assert box is not None
        assert answer["x"] + answer["width"] <= box["x"] + box["width"]


async def test_the_worst_rollout_opens_and_its_tokens_are_coloured(reader: Open, tmp_path: Path) -> None:
    async with reader(job_with_rollouts(tmp_path / "job"), path=ROLLOUTS, width=400) as page:
        await expect(page.page.get_by_role("status").filter(has_text="1 to 3 of 3 rollouts")).to_be_visible()
        await expect(page.page.get_by_role("img", name=re.compile("^Completion tokens: 3 rollouts"))).to_be_visible()
        await page.page.get_by_text("Filters and search").click()
        await page.page.get_by_label("Outcome").select_option("failed")
        await page.page.get_by_role("link", name="9-0").click()
        await expect(page.page.get_by_role("heading", level=1)).to_have_text("Rollout 9-0")
        await expect(page.page.locator(".turn")).to_have_count(2)
        await expect(page.page.locator(".turn").first).to_contain_text("<script>window.hacked = 1</script>")
        await expect(page.page.locator(".turn").first).to_contain_text("\\u202eevil\\x1b[2J")
        await stays_text(page)
        await page.page.get_by_role("button", name="Log-probability").click()
        await expect(page.page.locator(".tokens").first).to_contain_text("<script>window.hacked = 1</script>")
        await expect(page.page.get_by_text("Least likely:").first).to_be_visible()
        await page.page.get_by_role("button", name="Mismatch").click()
        await expect(page.page.get_by_text("training.token_export is off").first).to_be_visible()
        await stays_text(page)


async def test_a_turns_reward_and_advantage_stand_beside_it(reader: Open, tmp_path: Path) -> None:
    directory = tmp_path / "job"
    directory.mkdir()
    model = make_toy_model(tmp_path / "model")
    name_model(directory, model)
    chat = Chat(model)
    write_step(directory, "one", 1, [spoken(chat, 7, "one", "two", **OF_TURNS), spoken(chat, 8, "three")], chat)
    async with reader(directory, path="/jobs/job/runs/one/steps/1/rollouts/0") as page:
        facts = page.page.locator(".turn-facts")
        await expect(facts.first).to_contain_text("reward 0.2500 · advantage 0.5000")
        await expect(facts.last).to_contain_text("reward \N{MINUS SIGN}1 · advantage 0")
        assert await findings(page) == []
    async with reader(directory, path="/jobs/job/runs/one/steps/1/rollouts/1") as page:
        await expect(page.page.locator(".turn-facts")).to_have_count(1)
        assert "reward" not in await page.page.locator(".turn-facts").inner_text()


async def test_a_rollout_is_a_conversation_with_the_right_answer_beside_it(reader: Open, tmp_path: Path) -> None:
    directory = tmp_path / "job"
    directory.mkdir()
    (tmp_path / "model").mkdir()
    write_tokenizer(tmp_path / "model", longest=1024)
    chat = Chat(tmp_path / "model")
    for step in (1, 2):
        rollouts = [
            spoken(chat, 7, "three", "four", reward=reward / 4, answer=f"four {HOSTILE}") for reward in range(4)
        ]
        write_step(directory, "one", step, rollouts, chat)
    async with reader(directory, path="/jobs/job/runs/one/steps/2/rollouts/1") as page:
        turns = page.page.locator(".turn")
        await expect(turns).to_have_count(2)
        assert await turns.first.locator(".message-role").all_inner_texts() == ["user", "model"]
        assert await turns.last.locator(".said-text").all_inner_texts() == ["and then?", "four"]
        await expect(page.page.locator(".answer-box")).to_contain_text("four <script>window.hacked = 1</script>")
        await page.page.get_by_role("button", name="Template tokens").click()
        await expect(turns.first).to_contain_text("question 7<|end|><|assistant|>")
        attempts = page.page.get_by_role("list", name="Attempts at this example").get_by_role("link")
        await expect(attempts).to_have_count(8)
        current = page.page.locator(".attempt[aria-current]")
        await expect(current).to_have_attribute("aria-label", "step 2: 0.2500")
        await page.page.keyboard.press("]")
        await expect(current).to_have_attribute("aria-label", "step 2: 0.5000")
        await page.page.get_by_role("button", name="The attempt before").click()
        await page.page.get_by_role("button", name="The attempt before").click()
        await expect(current).to_have_attribute("aria-label", "step 2: 0")
        await stays_text(page)


async def test_messages_are_found_as_the_console_finds_them(reader: Open, tmp_path: Path) -> None:
    async with reader(job_with_rollouts(tmp_path / "job")) as page:
        ask = """texts => import('./views/conversation.js').then(({ messagesOf }) =>
            texts.map((text) => messagesOf(text).map(({ role, text }) => [role, text])))"""
        found = await page.page.evaluate(ask, [prompt for prompt, _ in PROMPTS])
        assert found == [[list(message) for message in messages] for _, messages in PROMPTS]
        async with asyncio.timeout(DEADLINE_SECONDS):  # in time that grows with the square, it would take far longer
            await page.page.evaluate(ask, hostile(1000))


async def test_the_strip_shows_the_open_attempt_however_many_there_are(reader: Open, tmp_path: Path) -> None:
    draw = """async ([step, size]) => {
        const { exampleChart } = await import("./views/rollout_example.js");
        const numbers = Array.from({ length: size }, (_, number) => number);
        const by_step = Array.from({ length: 100 }, (_, at) => ({ step: at, count: size, mean: 0.5, least: 0, most: 1, numbers, rewards: numbers.map(() => 0.5) }));
        const context = { parameters: { job: "job", run: "one", step: String(step), number: "3" }, shortcut() {}, link: () => "#/", get: async () => ({ by_step, left_out: 0, progress: {} }) };
        const one = exampleChart(context);
        one.open({ example_index: 1, environment: "sums", outcome: "completed" });
        await one.update();
        one.destroy();
        return [one.strip.querySelectorAll("[aria-current]").length, one.strip.querySelectorAll(".attempt").length];
    }"""  # noqa: E501
    async with reader(job_with_rollouts(tmp_path / "job"), path=ROLLOUTS) as page:
        for step, size, bars in ((0, 8, 480), (99, 16, 592), (50, 64, 576), (99, 64, 576), (70, 500, 500)):
            assert await page.page.evaluate(draw, [step, size]) == [1, bars]


async def test_a_search_finds_a_rollout_and_the_example_leads_to_other_steps(reader: Open, tmp_path: Path) -> None:
    async with reader(job_with_rollouts(tmp_path / "job"), path=ROLLOUTS) as page:
        await page.page.get_by_label("Search the texts of rollouts").fill("ATTEMPT 1")
        await page.page.keyboard.press("Enter")
        await expect(page.page.get_by_role("status").filter(has_text="1 found. Searched everything")).to_be_visible()
        await page.page.get_by_role("link", name="step 1, 7-0").click()
        await expect(page.page.get_by_text("3 attempts in 3 steps")).to_be_visible()
        await page.page.get_by_role("link", name="step 3: 0.3000").click()
        await expect(page.page.locator(".turn").first).to_contain_text("attempt 3")


async def test_populations_sweeps_and_clusters_are_drawn(reader: Open, tmp_path: Path) -> None:
    population = experiment(tmp_path / "population", [trial(1, error_msg=HOSTILE), trial(2, status="RUNNING")])
    write_results(population, "t1", [{"training_iteration": n, "score": float(n)} for n in (1, 2, 3)])
    with pytest.raises(RuntimeError), step_lock(f"{tmp_path}/sweep/bad"):
        raise RuntimeError(HOSTILE)
    master = Master(tmp_path / "cluster")
    await master.run()
    master.driver.exit("server-1", 1, reason=HOSTILE)
    await master.write()
    async with reader(population, tmp_path / "sweep", tmp_path / "cluster") as page:
        await page.go("/jobs/population/population")
        await expect(page.page.get_by_role("row").filter(has_text="t2")).to_contain_text("running")
        await expect(page.page.locator("svg.lineage .lane-name")).to_have_count(2)
        await expect(page.page.get_by_role("row").filter(has_text="<script>")).to_have_count(1)
        await expect(page.page.locator("td", has_text="<script>")).to_have_attribute("title", re.compile("<script>"))
        await expect(page.page.get_by_text("1 pending, 1 running")).to_be_visible()
        await stays_text(page)
        await page.go("/jobs/sweep/sweep")
        await expect(page.page.get_by_role("row").filter(has_text="bad")).to_contain_text("<script>")
        await stays_text(page)
        await page.go("/jobs/cluster/cluster")
        await expect(page.page.get_by_role("row").filter(has_text="running → restarting")).to_contain_text("<script>")
        await stays_text(page)


async def test_tenants_are_drawn(reader: Open, tmp_path: Path) -> None:
    session = await write_service(tmp_path / "job")
    async with reader(tmp_path / "job") as page:
        await page.go("/jobs/job/tenants")
        await expect(page.page.get_by_role("row").filter(has_text="anna").first).to_contain_text("500,000 of 1,000")
        await expect(page.page.get_by_role("row").filter(has_text=f"{session}:train:0")).to_contain_text("closed")
        await expect(page.page.get_by_role("row").filter(has_text="goes on")).to_contain_text("<script>")
        await stays_text(page)
