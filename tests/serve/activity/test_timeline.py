"""The timeline of steps: lanes, idle shares, what several runs share; and no file that somebody wrote can break it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.job.reading.activity import timeline as timeline_reader
from counterpoint.job.reading.activity.timeline import Timelines
from counterpoint.transport.telemetry.spans import SPANS_FILE, Span, SpanLog, line_of
from tests.serve.activity.jobs import BEGAN, SERVERS, fleet, write_fleet, write_spans
from tests.serve.api_client import api

RUN = "/jobs/job/runs/one"

numbers = st.floats(0, 100)


def lane(answer: dict[str, Any], key: str) -> dict[str, Any]:
    [found] = [lane for lane in answer["lanes"] if lane["key"] == key]
    assert isinstance(found, dict)
    return found


async def test_lanes_and_idle_shares_of_two_steps(tmp_path: Path) -> None:
    job = tmp_path / "job"
    write_spans(job, "one", 5)
    write_fleet(job, "one", fleet("one"))
    async with api(job) as client:
        status, answer = await client.get(f"{RUN}/timeline", step=4, span=2)
    assert status == 200
    assert (answer["begin"], answer["end"]) == (BEGAN + 20, BEGAN + 40)
    assert answer["known"] == [1, 2, 3, 4, 5]
    assert [step["step"] for step in answer["steps"]] == [3, 4]
    assert [lane["key"] for lane in answer["lanes"]] == [
        "orchestrator", "orchestrator beside", f"server {SERVERS[0]}", f"server {SERVERS[1]}", "trainer", "trainer beside",
    ]  # fmt: skip
    assert answer["idle"] == {"orchestrator": 0.8, "inference": 0.5, "trainer": 0.5}
    waited = [bar for bar in lane(answer, "orchestrator")["bars"] if bar["waiting"]]
    assert [(bar["name"], bar["end"] - bar["begin"]) for bar in waited] == [("generation", 8.0)] * 2
    assert {bar["detail"] for bar in lane(answer, "orchestrator beside")["bars"]} == {
        "bytes 1000", "version 2", "version 3",
    }  # fmt: skip
    assert {bar["step"] for bar in lane(answer, "trainer")["bars"] if bar["name"] == "forward"} == {2, 3}


@pytest.mark.slow
async def test_without_a_step_the_newest_are_shown(tmp_path: Path) -> None:
    job = tmp_path / "job"
    write_spans(job, "one", 2)
    async with api(job) as client:
        _, answer = await client.get(f"{RUN}/timeline", span=1)
        assert [step["step"] for step in answer["steps"]] == [2]
        write_spans(job, "one", 1, first=3)
        _, problem = await client.get(f"{RUN}/timeline", step=9)
        assert problem["error"]["expected"] == "1 to 3"
        _, answer = await client.get(f"{RUN}/timeline", step=3, span=1)
        assert [step["step"] for step in answer["steps"]] == [3]


async def test_a_run_without_spans_has_an_empty_timeline(tmp_path: Path) -> None:
    (tmp_path / "job" / "run_one").mkdir(parents=True)
    async with api(tmp_path / "job") as client:
        status, answer = await client.get(f"{RUN}/timeline")
        assert status == 200
        assert answer["lanes"] == answer["steps"] == []
        assert set(answer["idle"].values()) == {None}
        assert (await client.get("/jobs/job/runs/two/timeline"))[0] == 404


def test_runs_share_servers_and_trainer(tmp_path: Path) -> None:
    write_spans(tmp_path, "one", 2)
    (tmp_path / "run_two").mkdir()
    other = SpanLog(tmp_path / "run_two" / SPANS_FILE, "orchestrator", "two")
    other.record("serve", BEGAN + 10, BEGAN + 20, step=7, role="inference", server=SERVERS[1])
    other.record("merge", BEGAN + 10, BEGAN + 20, step=7)
    other.flush()
    trainer = SpanLog(tmp_path / "trainer" / SPANS_FILE, "trainer")
    trainer.record("forward", BEGAN + 15, BEGAN + 18, step=7, run="two")
    trainer.record("wait", BEGAN + 10, BEGAN + 15, step=7, run="two")
    trainer.flush()
    timelines = Timelines(tmp_path)
    found = timelines.show("one", timelines.steps("one"), timelines.steps("one")[1:], ())
    assert found.idle.inference == pytest.approx((0.2 + 0.0) / 2), "another run keeps the second server busy"
    assert found.idle.trainer == pytest.approx(1 - 0.5 - 0.3)
    assert found.idle.orchestrator == pytest.approx(0.8), "another run's orchestrator is another process"
    [trained] = [lane for lane in found.lanes if lane.key == "trainer"]
    assert {bar.run for bar in trained.bars if bar.name == "wait"} == {"one"}
    assert {bar.run for bar in trained.bars if bar.name == "forward"} == {"one", "two"}


def test_a_server_that_did_nothing_is_idle(tmp_path: Path) -> None:
    write_spans(tmp_path, "one", 1)
    timelines = Timelines(tmp_path)
    steps = timelines.steps("one")
    found = timelines.show("one", steps, steps, [*SERVERS, "http://127.0.0.1:8003"])
    assert found.idle.inference == pytest.approx((0.2 + 0.8 + 1.0) / 3)


@given(st.lists(st.tuples(numbers, numbers, st.sampled_from(["merge", "generation", "step"])), max_size=30))
@settings(max_examples=50)
def test_the_idle_share_is_what_no_work_covers(spans: list[tuple[float, float, str]]) -> None:
    made = [Span("orchestrator", name, begin, begin + length) for begin, length, name in spans]
    share = timeline_reader._idle_share(made, 0.0, 100.0)
    work = sorted((min(s.begin, 100.0), min(s.end, 100.0)) for s in made if s.name == "merge")
    covered, until = 0.0, 0.0
    for begin, end in work:
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    assert share == pytest.approx(1 - covered / 100, abs=1e-9)


@pytest.mark.slow
def test_thousands_of_spans_become_a_bounded_number_of_bars(tmp_path: Path) -> None:
    write_spans(tmp_path, "one", 1)
    log = SpanLog(tmp_path / "run_one" / SPANS_FILE, "orchestrator", "one")
    for index in range(5000):
        log.record("serve", BEGAN + index / 500, BEGAN + (index + 0.5) / 500, role="inference", server="http://busy")
    log.flush()
    timelines = Timelines(tmp_path)
    steps = timelines.steps("one")
    found = timelines.show("one", steps, steps, ())
    [busy] = [lane for lane in found.lanes if lane.title == "http://busy"]
    assert len(busy.bars) <= timeline_reader.MAX_BARS
    assert sum(bar.busy for bar in busy.bars) == pytest.approx(5.0)
    assert sum(bar.count for bar in busy.bars) == 5000


def test_a_repeated_step_counts_as_it_was_last(tmp_path: Path) -> None:
    write_spans(tmp_path, "one", 3)
    log = SpanLog(tmp_path / "run_one" / SPANS_FILE, "orchestrator", "one")
    log.record("step", BEGAN + 100, BEGAN + 104, step=3)
    log.flush()
    assert Timelines(tmp_path).steps("one")[-1] == (3, BEGAN + 100, BEGAN + 104)


async def test_hostile_and_torn_files_are_answered(tmp_path: Path) -> None:
    job = tmp_path / "job"
    write_spans(job, "one", 2)
    good = line_of(Span("orchestrator", "merge", BEGAN, BEGAN + 1, "one", 1))
    evil: list[Any] = [
        good | {"begin": -1}, good | {"begin": "now"}, good | {"end": 1e308}, good | {"step": -3}, good | {"attributes": 7},
        good | {"name": "<script>alert(1)</script>\u202e"}, {}, [], 3, good | {"role": None},
        good | {"role": "inference", "attributes": {"server": {"a": 1}}},
        good | {"role": "inference", "attributes": {"server": "x" * 10_000}},
    ]  # fmt: skip
    with (job / "run_one" / SPANS_FILE).open("ab") as file:
        file.writelines(orjson.dumps(line) + b"\n" for line in evil)
        file.write(b"\xff\xfe\n" + b"[" * 100_000 + b"\n" + b'{"role": "orch')
    async with api(job) as client:
        status, answer = await client.get(f"{RUN}/timeline")
    assert status == 200
    assert "\u202e" not in orjson.dumps(answer).decode()
    assert [step["step"] for step in answer["steps"]] == [1, 2]
