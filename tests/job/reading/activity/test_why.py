"""`counterpoint status --why`: a group's story, across stops and resumes, from files that may hold anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from counterpoint.cli import status
from counterpoint.job.reading.activity.why import describe_decision, explain
from counterpoint.orchestrator.decisions import DECISIONS_FILE
from counterpoint.transport.errors import UserError


def write(directory: Path, lines: list[Any], run_id: str = "a", name: str = DECISIONS_FILE) -> None:
    run_dir = directory / f"run_{run_id}"
    run_dir.mkdir(exist_ok=True)
    (run_dir / name).write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))


def of(group: int, decision: str, **fields: Any) -> dict[str, Any]:
    return {"time": 1e9, "group": group, "decision": decision, **fields}


def decided(directory: Path, name: str = "1") -> list[str]:
    return [line["decision"] for line in explain(directory, name)["a"]]


STALE = of(1, "dropped", reason="stale", detail="it would be 5 steps old", step=4)


def test_a_groups_story_is_told_describe_decision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = of(1, "started", environment="reverse", example_index=7, rollouts=8)
    finalized = of(1, "finalized", kept=6, filtered=1, failed=1)
    write(tmp_path, [start, of(2, "started")], name=f"{DECISIONS_FILE}.1")
    write(tmp_path, [finalized, of(2, "finalized"), STALE])
    said = [describe_decision(line).partition("  ")[2] for line in explain(tmp_path, "1-3")["a"]]
    assert said == [
        "started: 8 rollouts of example 7 of reverse",
        "finalized: 6 kept, 1 filtered, 1 failed",
        "dropped (stale): it would be 5 steps old",
    ]
    assert status.main([str(tmp_path), "--why", "1"]) == 0
    shown = capsys.readouterr().out
    assert all(each in shown for each in ["run a, group 1", *said])
    assert status.main([str(tmp_path), "--why", "dropped", "--json"]) == 0
    assert orjson.loads(capsys.readouterr().out) == {"a": [STALE]}


@pytest.mark.parametrize(
    ("last", "then", "expected"),
    [
        (of(1, "shipped", step=3), ["drained 3", "resumed 3"], ["shipped"]),
        (of(1, "shipped", step=3), ["resumed 3"], ["shipped"]),
        (of(1, "shipped", step=3), ["resumed 2"], ["shipped", "resumed"]),
        (STALE, ["resumed 5"], ["dropped"]),
        (STALE, ["resumed 4"], ["dropped", "resumed"]),
        (STALE, ["drained 4", "resumed 4"], ["dropped"]),
        (of(1, "started"), ["drained 1", "resumed 1"], ["started", "drained", "resumed"]),
    ],
)
def test_a_decision_holds_if_the_checkpoint_has_it(
    tmp_path: Path, last: dict[str, Any], then: list[str], expected: list[str]
) -> None:
    of_run = [{"time": 1e9, "decision": each.split()[0], "step": int(each.split()[1])} for each in then]
    write(tmp_path, [last, *of_run])
    assert decided(tmp_path) == expected


def test_what_no_run_knows_is_an_error_that_says_so(tmp_path: Path) -> None:
    write(tmp_path, [of(1, "started")])
    for name, said in (("2", "group 2"), ("dropped", "a dropped group"), ("one", "expected a group's id")):
        with pytest.raises(UserError, match=said):
            explain(tmp_path, name)


def test_a_file_may_hold_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = [3, {}, of(1, "no such\x1b[31m"), {"group": 1, "decision": 7}, {"group": [1], "decision": "dropped"}]
    odd = [
        {"group": 1, "decision": "dropped", "time": 1e300, "detail": {"x": "\x1b[2J" * 5000}},
        of(1, "shipped", step="3"),
    ]
    write(tmp_path, [*bad, *odd, {"decision": "resumed", "step": None}])
    assert status.main([str(tmp_path), "--why", "1"]) == 0
    assert status.main([str(tmp_path), "--why", "dropped"]) == 0
    assert "\x1b" not in capsys.readouterr().out
