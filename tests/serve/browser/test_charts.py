"""The curves of a run: they draw, move, zoom, lie over each other, and can be read without seeing them."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from playwright.async_api import Locator, expect

from tests.serve.browser.jobs import append_steps, small_job
from tests.serve.browser.reader import Reader
from tests.support.jobs import write_lines

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="package")]

Open = Callable[..., AbstractAsyncContextManager[Reader]]

RUN = "/jobs/job/runs/run-0000"

INK = """() => {
    const canvas = document.querySelector(".chart canvas");
    if (!canvas) return 0;
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let ink = 0;
    for (let at = 0; at < data.length; at += 4) if (data[at + 2] > data[at] + 60 && data[at + 3] > 200) ink += 1;
    return ink;
}"""
"""How many pixels of the first chart have the blue of its curve."""


def picture(page: Reader, title: str) -> Locator:
    """The curves of the chart with this title."""
    return page.page.get_by_role("img", name=re.compile(f"^{title}( in [a-z]+)?:"))


async def shown(page: Reader) -> tuple[float, float]:
    """The least and the greatest step of the first chart."""
    least, greatest = (await page.page.locator(".chart").first.get_attribute("data-range") or "nan nan").split()
    return float(least), float(greatest)


async def wait_for_range(page: Reader, condition: str) -> None:
    """Waits until all charts show the same range, for which an expression over `least` and `greatest` holds."""
    await page.wait(
        f"""() => {{
            const ranges = new Set([...document.querySelectorAll(".chart")].map((chart) => chart.dataset.range));
            const [least, greatest] = [...ranges][0]?.split(" ").map(Number) ?? [];
            return ranges.size === 1 && ({condition});
        }}"""
    )


async def test_curves_draw_and_move_when_steps_are_appended(reader: Open, tmp_path: Path) -> None:
    async with reader(small_job(tmp_path / "job"), path=RUN) as page:
        await wait_for_range(page, "least === 1 && greatest === 40")
        assert await page.page.evaluate(INK) > 100
        await expect(picture(page, "Reward")).to_have_attribute("aria-label", re.compile(r"mean now 0\.\d+, from 0"))
        before = await picture(page, "Reward").get_attribute("aria-label")
        append_steps(tmp_path / "job", "run-0000", 41, 80)
        await wait_for_range(page, "greatest === 80")
        await expect(picture(page, "Loss")).to_have_attribute("aria-label", re.compile("loss now"))
        assert await picture(page, "Reward").get_attribute("aria-label") != before
        await expect(page.page.locator(".figure").first).to_contain_text("80")


async def test_a_zoom_by_dragging_stays_while_points_arrive(reader: Open, tmp_path: Path) -> None:
    async with reader(small_job(tmp_path / "job"), path=RUN) as page:
        await wait_for_range(page, "greatest === 40")
        over = page.page.locator(".chart .u-over").first
        box = await over.bounding_box()
        assert box is not None
        await page.page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 40)
        await page.page.mouse.down()
        await page.page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 40, steps=4)
        await page.page.mouse.up()
        await wait_for_range(page, "least > 5 && greatest < 35")
        zoomed = await shown(page)
        append_steps(tmp_path / "job", "run-0000", 41, 60)
        await expect(page.page.locator(".figure").first).to_contain_text("60")
        await page.ask()
        assert await shown(page) == zoomed
        await page.page.get_by_role("button", name="Reset the zoom of Reward", exact=True).click()
        await wait_for_range(page, "least === 1 && greatest === 60")


async def test_keys_move_zoom_and_reset(reader: Open, tmp_path: Path) -> None:
    async with reader(small_job(tmp_path / "job"), path=RUN) as page:
        await wait_for_range(page, "greatest === 40")
        await picture(page, "Reward").focus()
        press = page.page.keyboard.press
        await press("ArrowRight")
        await press("ArrowLeft")
        await expect(page.page.locator(".chart-at").first).to_have_text("step 39")
        await press("+")
        await wait_for_range(page, "least > 10 && greatest > 39")
        await press("Shift+ArrowLeft")
        await wait_for_range(page, "greatest < 38")
        await press("0")
        await wait_for_range(page, "least === 1 && greatest === 40")


async def test_other_runs_lie_over_the_curve_and_in_the_address(reader: Open, tmp_path: Path) -> None:
    small_job(tmp_path / "other", runs=1, steps=30)
    async with reader(small_job(tmp_path / "job"), tmp_path / "other", path=RUN) as page:
        await page.page.get_by_role("button", name="Compare with…").click()
        dialog = page.page.get_by_role("dialog")
        await dialog.get_by_label("run-0001").check()
        await dialog.get_by_label("run-0000 other").check()
        await dialog.get_by_role("button", name="Compare", exact=True).click()
        await expect(picture(page, "Reward")).to_have_attribute(
            "aria-label", re.compile("run-0001 now.*other/run-0000 now")
        )
        compared = page.page.get_by_role("list", name="Runs that are compared")
        await expect(compared.get_by_role("listitem")).to_have_count(3)
        address = page.page.url
        await page.page.get_by_role("button", name="Leave out run-0001").click()
        await expect(compared.get_by_role("listitem")).to_have_count(2)
        legend = page.page.get_by_role("figure", name="Mismatch KL").locator(".legend .name")
        await expect(legend).to_have_text(["run-0000", "other/run-0000"])
        await page.page.goto(address)
        await page.page.reload()
        await expect(compared.get_by_role("listitem")).to_have_count(3)


async def test_a_chart_is_also_a_table(reader: Open, tmp_path: Path) -> None:
    async with reader(small_job(tmp_path / "job"), path=RUN) as page:
        await page.page.get_by_role("button", name="Show Staleness as a table").press("Enter")
        rows = page.page.get_by_role("region", name="Staleness as a table").get_by_role("row")
        await expect(rows).to_have_count(41)
        await expect(rows.nth(1)).to_contain_text("40")


async def test_a_chart_is_enlarged_drawn_over_the_logarithm_and_saved(reader: Open, tmp_path: Path) -> None:
    small_job(tmp_path / "other", runs=1, steps=30)
    compared = f"{RUN}?with=other~run-0000"
    async with reader(small_job(tmp_path / "job"), tmp_path / "other", path=compared) as page:
        chart = page.page.get_by_role("figure", name="Mismatch KL")
        await chart.get_by_role("button", name="Draw Mismatch KL over the logarithm").click()
        await chart.get_by_role("button", name="Enlarge Mismatch KL").click()
        box = await chart.bounding_box()
        assert box is not None
        assert box["height"] > 420
        await page.page.get_by_role("button", name="log", exact=True).click()
        await wait_for_range(page, "least === 1 && greatest === 40")
        assert "log=Mismatch" in page.page.url
        assert "logx=1" in page.page.url
        await page.page.reload()
        button = chart.get_by_role("button", name="Draw Mismatch KL over the logarithm")
        await expect(button).to_have_attribute("aria-pressed", "true")
        async with page.page.expect_download() as saved:
            await chart.get_by_role("button", name="Save Mismatch KL as CSV").click()
        lines = (await (await saved.value).path()).read_text().splitlines()
        assert lines[0] == '"step","run-0000","other/run-0000"'
        assert [line.split(",")[0] for line in lines[1:]] == [str(step) for step in range(1, 41)]
        assert lines[40].endswith(","), "the other run has no such step"
        async with page.page.expect_download() as saved:
            await chart.get_by_role("button", name="Save Mismatch KL as a picture").click()
        download = await saved.value
        assert download.suggested_filename == "Mismatch_KL.png"
        assert (await download.path()).read_bytes().startswith(b"\x89PNG")


async def test_a_logarithmic_axis_leaves_out_what_has_no_logarithm(reader: Open, tmp_path: Path) -> None:
    async with reader(small_job(tmp_path / "job")) as page:
        columns = await page.page.evaluate(
            "import('./widgets/chart_series.js').then(({ columnsOf }) =>"
            " columnsOf([1, 2, 3, 4], [{ mean: [1, 0, -1, null], minimum: [0, 1, 1, 1], maximum: [1, 1, 1, 1] }], true))"
        )
        assert columns == [[1, 2, 3, 4], [1, 1, 1, 1], [None, 1, 1, 1], [1, None, None, None]]
        drawn = await page.page.evaluate(
            "import('./views/curves.js').then(({ chartData }) => {"
            " const curves = { get: () => ({ x: [0, 1, 2], mean: [7, 8, 9], low: [7, 8, 9], high: [7, 8, 9], exact: true }) };"
            " const options = { axis: 'step', smoothing: 0, began: new Map(), isLogX: true };"
            " const runs = [{ job: 'j', run: 'r', label: 'r' }];"
            " const data = chartData({ metrics: [{ name: 'm', label: 'm' }] }, runs, curves, options);"
            " return [data.x, data.curves[0].mean]; })"
        )
        assert drawn == [[1, 2], [8, 9]]


async def test_beside_other_runs_a_colour_is_a_run(reader: Open, tmp_path: Path) -> None:
    async with reader(small_job(tmp_path / "job"), path=f"{RUN}?with=job~run-0001") as page:
        swatches = page.page.get_by_role("figure", name="Staleness").locator(".swatch")
        await expect(swatches).to_have_count(4)
        looks = await swatches.evaluate_all("all => all.map(({ dataset }) => [dataset.series, dataset.dash])")
        assert looks == [["1", "0"], ["1", "2"], ["2", "0"], ["2", "2"]]


async def test_sections_open_and_the_filter_finds_metrics(reader: Open, tmp_path: Path) -> None:
    async with reader(small_job(tmp_path / "job"), path=RUN) as page:
        await page.page.get_by_role("button", name="Phases").click()
        await expect(picture(page, "generation")).to_have_attribute("aria-label", re.compile("phase/generation now"))
        await page.page.get_by_label("Filter metrics").fill("rss")
        await expect(page.page.locator(".chart")).to_have_count(1)
        await expect(picture(page, "rss_bytes")).to_have_attribute("aria-label", re.compile("MiB"))


async def test_the_loop_names_the_code_at_its_peaks(reader: Open, tmp_path: Path) -> None:
    job = small_job(tmp_path / "job", runs=1, steps=510)
    async with reader(job, path=f"{RUN}/loop") as page:
        row = page.page.get_by_role("row").filter(has_text="500")
        await expect(row).to_contain_text("Grader.score")
        await expect(row).to_contain_text("tasks/grader.py:41")


async def test_small_values_beside_an_axis_are_short_and_sections_have_words(reader: Open, tmp_path: Path) -> None:
    async with reader(small_job(tmp_path / "job"), path=RUN) as page:
        ticks = await page.page.evaluate(
            "Promise.all([import('./widgets/chart_series.js'), import('./shell/format.js')]).then(([{ tickOf }, { number }]) =>"
            " [[0, 2.5e-5], [7.5e-5, 2.5e-5], [1e-4, 2.5e-5], [-1.25e-4, 2.5e-5], [0.25, 0.05], [1e-3, 5e-4]]"
            ".map(([value, step]) => tickOf(value, step, number)))"
        )
        assert [tick.replace("\N{MINUS SIGN}", "-") for tick in ticks] == [
            "0",
            "7.5e-5",
            "1e-4",
            "-1.25e-4",
            "0.25",
            "0.0010",
        ]
        titles = await page.page.evaluate(
            "import('./views/metric_charts.js').then(({ chartsOf }) =>"
            " chartsOf(['masked_share/toy', 'mismatch_kl/toy', 'phase/merge']).sections.map(({ title }) => title))"
        )
        assert titles == ["Masked share", "Mismatch KL", "Phases"]


async def test_the_overview_fits_a_common_screen(reader: Open, tmp_path: Path) -> None:
    async with reader(small_job(tmp_path / "job"), width=1265) as page:
        await expect(page.page.get_by_role("columnheader", name="Updated")).to_be_visible()
        assert await page.page.evaluate(
            "[...document.querySelectorAll('.table-scroll')].every((box) => box.scrollWidth <= box.clientWidth)"
        )


async def test_evaluations_come_first_with_their_interval(reader: Open, tmp_path: Path) -> None:
    directory = small_job(tmp_path / "job")
    metrics = directory / "run_run-0000" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for number, line in enumerate(lines):
        if number % 2:
            passed = number / len(lines)
            interval = {"": passed, "/low": passed / 2, "/high": (1 + passed) / 2}
            line |= {f"evaluation/held-out/pass@1{end}": value for end, value in interval.items()}
            line |= {"evaluation/held-out/reward/mean": passed, "evaluation/held-out/sums/pass@1": passed}
    write_lines(metrics, lines)
    async with reader(directory, path=RUN) as page:
        titles = page.page.locator(".chart-title")
        await expect(titles.nth(0)).to_have_text("held-out: pass@1")
        await expect(titles.nth(1)).to_have_text("held-out: reward")
        await expect(titles.nth(2)).to_have_text("Reward")
        named = await page.page.evaluate(
            "import('./views/metric_charts.js').then(({ chartsOf }) =>"
            " [['reward/a/mean', 'reward/b/mean', 'evaluation/e/pass@1'], ['reward/mean', 'reward/a/mean']]"
            ".map((names) => chartsOf(names)).map(({ first, sections }) => [...first, ...sections].map(({ title }) => title)))"
        )
        assert named == [["e: pass@1", "Reward by environment"], ["Reward"]], (
            "of one environment it is the reward once more"
        )
        drawn = await page.page.evaluate(
            "import('./views/curves.js').then(({ chartData }) => {"
            " const curve = (mean) => ({ x: [1, 2], mean, low: mean, high: mean, exact: true });"
            " const curves = { get: (job, run, name) => ({ m: curve([3, 4]), l: curve([1, 2]), h: curve([5, 6]) })[name] };"
            " const spec = { metrics: [{ name: 'm', label: 'm', low: 'l', high: 'h' }] };"
            " const options = { axis: 'step', smoothing: 0, began: new Map() };"
            " const { curves: [one] } = chartData(spec, [{ job: 'j', run: 'r', label: 'r' }], curves, options);"
            " return [one.mean, one.minimum, one.maximum]; })"
        )
        assert drawn == [[3, 4], [1, 2], [5, 6]]


async def test_the_reward_by_turn_is_one_chart_an_environment(reader: Open, tmp_path: Path) -> None:
    directory = small_job(tmp_path / "job")
    metrics = directory / "run_run-0000" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for number, line in enumerate(lines):
        line |= {f"reward/game/turn/{turn}/mean": number / place for place, turn in enumerate(("9-16", "1", "2"), 1)}
    write_lines(metrics, lines)
    async with reader(directory, path=RUN) as page:
        titles = page.page.locator(".chart-title")
        await expect(titles.filter(has_text="game: reward by turn")).to_have_count(1)
        chart = page.page.get_by_role("img", name=re.compile("^game: reward by turn"))
        await expect(chart).to_be_visible()
        made = await page.page.evaluate(
            "import('./views/metric_charts.js').then(({ chartsOf }) => chartsOf(['reward/mean', 'reward/a/turn/9-16/mean',"
            " 'reward/a/turn/2/mean', 'reward/b/turn/1/mean', 'loss']))"
        )
        assert [(spec["title"], [metric["label"] for metric in spec["metrics"]]) for spec in made["first"]] == [
            ("Reward", ["mean"]),
            ("a: reward by turn", ["turn 2", "turn 9-16"]),
            ("b: reward by turn", ["turn 1"]),
            ("Loss", ["loss"]),
        ]
        assert made["sections"] == []


async def test_a_logarithmic_axis_without_points_or_with_a_zoom_that_begins_at_0_is_drawn(
    reader: Open, tmp_path: Path
) -> None:
    draw = """async ([x, range]) => {
        const widgets = ["chart", "zoom_group", "palette"].map((name) => import(`./widgets/${name}.js`));
        const [{ chart }, { ZoomGroup }, { styleOf }] = await Promise.all(widgets);
        const group = new ZoomGroup();
        const one = chart({ title: "one", group, isLog: true });
        document.getElementById("view").replaceChildren(one.element);
        const curves = [{ key: "a", label: "a", style: styleOf(0), mean: x }];
        one.update({ x, axis: "step", isLogX: true, curves });
        if (range) group.zoom(range);
        await new Promise((done) => setTimeout(done));
        const shown = one.element.dataset.range.split(" ").map(Number);
        one.destroy();
        return shown;
    }"""
    async with reader(small_job(tmp_path / "job"), path="/jobs/job/logs") as page:
        for x, zoom, shown in (([], None, [1, 2]), ([2, 8], [0, 5], [2, 5]), ([2, 8], [-3, 0], [2, 8])):
            assert await page.page.evaluate(draw, [x, zoom]) == shown


async def test_what_a_spreadsheet_would_take_for_a_formula_is_saved_as_text(reader: Open, tmp_path: Path) -> None:
    head = """async (labels) => {
        const { saveCsv } = await import("./widgets/chart_export.js");
        let saved = null;
        URL.createObjectURL = (blob) => { saved = blob; return "blob:none"; };
        HTMLAnchorElement.prototype.click = () => {};
        saveCsv("one", { x: [1], axis: "step", curves: labels.map((label) => ({ label, mean: [1] })) });
        return (await saved.text()).split("\\n")[0];
    }"""
    formulas = ['=HYPERLINK("http://x")', "+1", "-1", "@SUM(A1)", "  =1", "\u202e=1", "\uff1d1"]
    async with reader(small_job(tmp_path / "job"), path="/jobs/job/logs") as page:
        (row,) = csv.reader([await page.page.evaluate(head, [*formulas, "reward/mean", "a,b"])])
    assert row[1:3] == ["'" + formulas[0], "'+1"]
    assert all(cell.startswith("'") or cell.startswith("\\u202e") for cell in row[1:8])
    assert row[8:] == ["reward/mean", "a,b"]
