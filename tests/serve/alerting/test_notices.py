"""Which messages are due, and what is in them: no problem is told twice, and nothing hostile is in a message."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.job.inspection.history import History
from counterpoint.serve.alerting.notices import GONE_SECONDS, LONGEST_MESSAGE, Ledger, Notice, body_of, end_of
from counterpoint.serve.readers.job_facts import JobFacts, RunFacts
from counterpoint.serve.readers.problems import Kind, Problem

STALL = Problem(Kind.STALLED, "warning", "no step for 5 min", "see", since=100.0, run="a")
EVICTED = Problem(Kind.EVICTED, "error", "evicted: by an operator", "see", since=50.0, run="a")


def told(ledger: Ledger, now: float) -> list[tuple[str, str, tuple[str, ...]]]:
    """Sends all that is due."""
    sent = ledger.due(now)
    for notice in sent:
        ledger.told(notice)
    return [(notice.event, notice.kind, notice.runs) for notice in sent]


def test_a_problem_is_told_once_when_it_begins_and_once_when_it_has_ended() -> None:
    ledger = Ledger(["error"], {})
    ledger.observe([EVICTED, STALL], 100)
    assert told(ledger, 100) == [("problem", "evicted", ("a",))]
    assert told(ledger, 101) == []
    ledger.observe([], 110)
    assert told(ledger, 110) == []
    ledger = Ledger(["error"], ledger.saved)  # a restart
    ledger.observe([], 120)
    (ended,) = ledger.due(110 + GONE_SECONDS)
    assert (ended.event, ended.since) == ("problem-ended", 50.0)
    assert ended.message == "ended after 1 min 00 s: evicted: by an operator", "when it was not seen any more"
    ledger.told(ended)
    assert (ledger.due(1000), ledger.saved) == ([], {})


def test_one_that_comes_and_goes_is_one_and_one_that_gets_worse_is_told_again() -> None:
    ledger = Ledger(["error", "warning"], {})
    for now in (100, 110, 120):
        ledger.observe([STALL] if now != 110 else [], now)
        assert told(ledger, now) == ([("problem", "stalled", ("a",))] if now == 100 else [])
    ledger.observe([replace(STALL, severity="error")], 130)
    assert told(ledger, 130) == [("problem", "stalled", ("a",))]
    ledger.observe([STALL], 140)
    assert told(ledger, 140) == []


def test_equal_problems_of_many_runs_are_one_message() -> None:
    ledger = Ledger(["error"], {})
    ledger.observe([replace(EVICTED, run=f"r{number}") for number in range(500)], 100)
    (notice,) = ledger.due(100)
    body = body_of(notice, "demo", "https://page.example.org/", 100.0)
    assert (len(notice.runs), len(body["runs"]), body["run"]) == (500, 20, "")
    assert body["link"] == "https://page.example.org/#/jobs/demo"
    ledger.told(notice)
    assert ledger.due(101) == []


@given(st.lists(st.lists(st.sampled_from([STALL, EVICTED, replace(EVICTED, run="b")]), unique=True), max_size=30))
def test_beginnings_and_ends_alternate_for_each_problem(seen: list[list[Problem]]) -> None:
    ledger, now = Ledger(["error", "warning"], {}), 0.0
    begun: set[str] = set()
    for problems in [*seen, []]:
        now += 20
        ledger.observe(problems, now)
        for notice in ledger.due(now):
            for key in notice.keys:
                assert (key in begun) == (notice.event == "problem-ended")
                begun ^= {key}
            ledger.told(notice)
    ledger.observe([], now + GONE_SECONDS)
    for notice in ledger.due(now + GONE_SECONDS):
        begun -= {*notice.keys}
    assert begun == set()


@pytest.mark.parametrize(
    "told",
    [
        {"evicted|a|": None},
        {"evicted|a|": {"gone": None}},
        {"evicted": {"severity": "error", "reason": "", "since": 1.0, "gone": 1.0}},
        {"evicted|a|": {"severity": "error", "reason": "", "since": "now", "gone": 1.0}},
        {"evicted|a|": {"severity": "error", "reason": "", "since": math.nan, "gone": 1.0}},
    ],
)
def test_what_another_wrote_as_told_was_not_told(told: dict[str, Any]) -> None:
    ledger = Ledger(["error"], told)
    ledger.observe([EVICTED], 1000.0)
    assert [notice.event for notice in ledger.due(1000.0)] == ["problem"]


def test_text_of_a_run_cannot_mention_a_channel_or_show_a_key_and_is_bounded() -> None:
    reason = (
        "<!channel> <https://evil.example|log in> api_key=abcdef1234567890 @all @channel [in](http://e) "
        + "x" * 100_000
    )
    notice = Notice("problem", "error", "failing-environment", reason, 1.0, ("a",))
    body = body_of(notice, "demo", "", 2.0)
    assert body["text"].startswith("[error] demo, run a: failing-environment &lt;!channel&gt; &lt;https://evil")
    assert "<" not in body["text"]
    assert not {"@all", "@channel"} & {*body["text"].split()}
    assert "](" not in body["text"]
    assert "abcdef1234567890" not in str(body)
    assert len(body["message"]) <= LONGEST_MESSAGE
    assert body["link"] is None


def test_what_is_cut_of_a_reason_that_was_told_leaves_no_secret_without_its_name() -> None:
    for rest in range(LONGEST_MESSAGE // 3):
        ledger = Ledger(["error"], {})
        reason = "word " * (LONGEST_MESSAGE // 4) + f"password: hunter2hunter2 {'z' * rest}"
        ledger.observe([replace(EVICTED, reason=reason)], 100)
        told(ledger, 100)
        ledger.observe([], 110)
        (notice,) = ledger.due(110 + GONE_SECONDS)
        assert "hunter2" not in str(body_of(notice, "demo", "", 200.0))


def ended(*runs: RunFacts, workers: list[dict[str, Any]] | None = None, running: bool = True) -> tuple[str, str]:
    notice = end_of(JobFacts(Path("job"), 100.0, running, "stopping", workers or [], [*runs]))
    return notice.event, notice.message


def test_a_job_is_finished_failed_or_stopped() -> None:
    done = RunFacts("a", History("a", steps=3), state="done")
    left = RunFacts("b", History("b", steps=3), state="not running")
    evicted = RunFacts("c", History("c", steps=3), state="evicted", exclusion="evicted: by an operator")
    guest = replace(left, is_guest=True)
    dead = {"name": "orchestrator_b", "state": "failed", "last_death": "exit code 1"}
    assert ended(done, guest) == ("job-finished", "finished: 1 run done")
    assert ended(done, left) == ("job-stopped", "stopped: b after step 0")
    assert ended(done, evicted) == ("job-failed", "run c was evicted: by an operator")
    assert ended(done, left, workers=[dead]) == ("job-failed", "orchestrator_b failed: exit code 1")
    assert ended(done, left, running=False)[0] == "job-failed"
    assert ended(done, running=False)[0] == "job-finished", "whoever follows it by hand outlives its command"
