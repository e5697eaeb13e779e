"""What became of groups, by step: counted from the decisions, told one by one with the records; from files that anybody wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from counterpoint.job.reading.activity import group_fates
from counterpoint.job.reading.activity.group_fates import GroupFates
from counterpoint.orchestrator.decisions import DECISIONS_FILE, Decision, DecisionLog
from counterpoint.transport.files.atomic import publish_directory
from tests.serve.activity.jobs import write_decisions
from tests.serve.api_client import api

RUN = "/jobs/job/runs/one"


def write_records(job: Path, step: int, records: list[dict[str, Any]]) -> None:
    with publish_directory(job / "run_one" / "rollouts" / f"step_{step}") as directory:
        (directory / "rollouts.jsonl").write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in records))


def record(group: int, index: int, **fields: Any) -> dict[str, Any]:
    values = {"rollout_id": f"{group}-{index}", "group_id": group, "environment": "toy", "example_index": group}
    return values | {"reward": 0.25 * index, "outcome": "completed", "turns": []} | fields


async def test_groups_are_counted_by_step(tmp_path: Path) -> None:
    job = tmp_path / "job"
    write_decisions(job, "one", 3)
    async with api(job) as client:
        status, answer = await client.get(f"{RUN}/groups", span=2)
    assert status == 200
    assert answer["in_flight"] == 0
    assert [step["step"] for step in answer["steps"]] == [2, 3]
    assert answer["steps"][0] == {
        "step": 2, "shipped": 2, "dropped": [{"name": "stale", "count": 1}],
        "rollouts_kept": 7, "rollouts_filtered": 1, "rollouts_failed": 0,
    }  # fmt: skip


async def test_the_groups_of_a_step_say_why(tmp_path: Path) -> None:
    job = tmp_path / "job"
    write_decisions(job, "one", 2)
    records = [
        record(6, 0), record(6, 1),
        record(7, 0, filtered_by="zero_advantage"), record(7, 1, error="ValueError: <b>no</b>", reward=None),
        record(8, 0, dropped="stale"), record(99, 0, dropped="incomplete"),
    ]  # fmt: skip
    write_records(job, 2, records)
    async with api(job) as client:
        status, answer = await client.get(f"{RUN}/steps/2/groups")
        assert (await client.get(f"{RUN}/steps/7/groups"))[0] == 404
    assert status == 200
    groups = {group["group"]: group for group in answer["groups"]}
    assert {number: group["fate"] for number, group in groups.items()} == {
        6: "shipped", 7: "shipped", 8: "dropped", 99: "unknown",
    }  # fmt: skip
    assert (groups[6]["kept"], groups[6]["reward_mean"], groups[6]["reward_max"]) == (2, 0.125, 0.25)
    assert (groups[7]["kept"], groups[7]["filtered"], groups[7]["failed"]) == (0, 1, 1)
    assert {cause["name"] for cause in groups[7]["causes"]} == {"filter zero_advantage", "ValueError"}
    assert (groups[8]["reason"], groups[8]["detail"], groups[8]["kept"]) == ("stale", "too old", 0)
    assert [groups[number]["causes"] for number in (8, 99)] == [
        [{"name": "group dropped: stale", "count": 1}], [{"name": "group dropped: incomplete", "count": 1}],
    ]  # fmt: skip
    assert [(groups[number]["kept"], groups[number]["failed"]) for number in (8, 99)] == [(0, 0), (0, 0)]
    assert answer["progress"]["is_complete"]
    assert (answer["causes_of"], answer["causes_among"]) == (4, 4)


def test_a_kill_undoes_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    write_decisions(tmp_path, "one", 3)
    fates = GroupFates(tmp_path, "one")
    fates.update()
    assert [step.step for step in fates.steps()] == [1, 2, 3]
    log = DecisionLog(tmp_path / "run_one")
    log.of_run(Decision.RESUMED, 2)
    log.of_group(50, Decision.STARTED, environment="toy", example_index=1, rollouts=4)
    log.of_group(50, Decision.DROPPED, reason="filtered", detail="", step=2)
    log.of_group(51, Decision.STARTED, environment="toy", example_index=1, rollouts=4)
    log.flush()
    fates.update()
    last = fates.steps()[-1]
    assert (last.step, last.groups_shipped, dict(last.dropped)) == (3, 0, {"filtered": 1})
    assert fates.in_flight == 1


def test_memory_is_bounded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(group_fates, "MAX_STEPS", 5)
    monkeypatch.setattr(group_fates, "MAX_STEPS_WITH_GROUPS", 2)
    monkeypatch.setattr(group_fates, "MAX_OPEN", 10)
    write_decisions(tmp_path, "one", 20)
    log = DecisionLog(tmp_path / "run_one")
    for group in range(1000, 1100):
        log.of_group(group, Decision.STARTED, environment="toy", example_index=1, rollouts=4)
    log.flush()
    fates = GroupFates(tmp_path, "one")
    fates.update()
    assert [step.step for step in fates.steps()] == [16, 17, 18, 19, 20]
    assert [len(step.groups) for step in fates.steps()] == [0, 0, 0, 3, 3]
    assert all(step.left_out + len(step.groups) == 3 for step in fates.steps())
    assert fates.in_flight == 10


async def test_hostile_and_torn_decisions_are_answered(tmp_path: Path) -> None:
    job = tmp_path / "job"
    write_decisions(job, "one", 1)
    evil: list[Any] = [
        {"group": 1, "decision": ["shipped"], "step": 1}, {"group": -1, "decision": "shipped", "step": 1},
        {"group": 2, "decision": "shipped", "step": 2**60}, {"group": 3, "decision": "dropped", "step": 1, "reason": {"a": 1}},
        {"group": True, "decision": "shipped", "step": 1}, {"decision": "resumed", "step": "1"}, [], 4,
        {"group": 4, "decision": "dropped", "step": 1, "reason": "<script>\u202e", "detail": "x" * 9999},
        {"group": 5, "decision": "finalized", "kept": "many"},
    ]  # fmt: skip
    with (job / "run_one" / DECISIONS_FILE).open("ab") as file:
        file.writelines(orjson.dumps(line) + b"\n" for line in evil)
        file.write(b'{"group": 9, "deci')
    async with api(job) as client:
        status, answer = await client.get(f"{RUN}/groups")
        assert status == 200
        assert [step["step"] for step in answer["steps"]] == [1, 2]
        status, answer = await client.get(f"{RUN}/steps/2/groups")
        assert status == 200
        assert "\u202e" not in orjson.dumps(answer).decode()


def test_what_cannot_be_read_tells_nothing(tmp_path: Path) -> None:
    write_decisions(tmp_path, "one", 3)
    log = tmp_path / "run_one" / DECISIONS_FILE
    elsewhere = log.rename(tmp_path / "elsewhere")
    log.symlink_to(elsewhere)
    fates = GroupFates(tmp_path, "one")
    fates.update()
    assert fates.steps() == []
    elsewhere.replace(log)
    fates.update()
    assert [each.step for each in fates.steps()] == [1, 2, 3]
