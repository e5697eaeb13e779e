"""Lists, one rollout, search and examples as the page asks for them, over good files and hostile ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from counterpoint.environments.chat import Chat
from counterpoint.job.reading.rollouts import line_index, view
from counterpoint.serve.api import rollout_search, rollouts
from tests.serve.api_client import Client, api
from tests.serve.rollouts.jobs import HOSTILE, OF_TURNS, spoken, write_lines, write_step

RUN = "/jobs/job/runs/one"


async def listed(client: Client, **query: Any) -> list[tuple[int, int]]:
    status, answer = await client.get(f"{RUN}/rollouts", **query)
    assert status == 200, answer
    assert answer["progress"]["is_complete"]
    return [(entry["step"], entry["number"]) for entry in answer["rollouts"]]


async def test_lists_are_sorted_filtered_and_paged(job: Path) -> None:
    async with api(job) as client:
        assert await listed(client) == [(3, number) for number in range(6)]
        assert await listed(client, sort="worst", limit=2) == [(3, 2), (3, 0)]
        assert await listed(client, sort="worst", limit=2, offset=2) == [(3, 1), (3, 4)]
        assert await listed(client, sort="best", step=3, span=3, limit=4) == [(3, 4), (3, 1), (3, 0), (2, 0)]
        assert await listed(client, span=3, outcome="completed", most_reward=0.2) == [(2, 0), (1, 0)]
        assert await listed(client, environment="duel") == await listed(client, player="white") == [(3, 1)]
        assert await listed(client, outcome="inference_failed") == [(3, 5)]
        _, answer = await client.get(f"{RUN}/rollouts")
        assert (answer["steps"], answer["shown"], answer["total"], answer["of"]) == ([1, 2, 3], [3], 6, 6)
        assert (answer["environments"], answer["players"]) == (["duel", "toy"], ["white"])
        entry = answer["rollouts"][1]
        assert (entry["versions"], entry["servers"], entry["turns"]) == ([2, 2], ["http://127.0.0.1:1"], 2)
        assert (entry["beginning"], entry["reward"], entry["rollout_id"]) == ("two words</s>", 0.75, "1-0")
        assert answer["rollouts"][2]["reason"] == "repetition"


async def test_what_was_not_trained_since_its_group_was_dropped_says_so(job: Path, chat: Chat) -> None:
    rollouts = [
        spoken(chat, number, "old", reward=0.5, dropped=why) for number, why in enumerate(["stale", "incomplete"])
    ]
    write_step(job, "one", 4, [*rollouts, spoken(chat, 2, "new", reward=0.5)], chat)
    async with api(job) as client:
        _, answer = await client.get(f"{RUN}/rollouts", step=4)
        assert {entry["number"]: (entry["outcome"], entry["reason"]) for entry in answer["rollouts"]} == {
            0: ("stale", "stale"), 1: ("dropped", "incomplete"), 2: ("completed", ""),
        }  # fmt: skip
        for outcome, number in (("stale", 0), ("dropped", 1), ("completed", 2)):
            assert await listed(client, step=4, outcome=outcome) == [(4, number)]
        _, answer = await client.get(f"{RUN}/steps/4/rollouts/0")
        assert answer["parts"]["dropped"] == "stale"


async def test_what_was_dropped_and_no_step_has_recorded_yet_is_step_0(job: Path) -> None:
    record = {"rollout_id": "9-1", "environment": "toy", "error": "KeyError: 'x'", "answer": "4", "turns": []}
    async with api(job) as client:
        for name in ("discarded.jsonl", "no_difference.jsonl"):
            (job / "run_one" / name).write_bytes(orjson.dumps(record | {"answer": name}) + b"\n")
            _, answer = await client.get(
                f"{RUN}/rollouts", step=0, limit=len(name)
            )  # an equal request has a kept answer
            assert (answer["steps"], answer["shown"], answer["total"]) == ([0, 1, 2, 3], [0], 1)
            _, answer = await client.get(f"{RUN}/steps/0/rollouts/0", characters=100 * len(name))
            assert answer["parts"]["error"]["text"] == "KeyError: 'x'"
            assert answer["parts"]["answer"]["text"] == name
        assert (await listed(client))[0][0] == 3, "the newest is a step's"


async def test_a_turn_has_its_own_reward_and_advantage_where_the_record_has_them(tmp_path: Path, chat: Chat) -> None:
    (tmp_path / "job").mkdir()
    write_step(tmp_path / "job", "one", 1, [spoken(chat, 1, "one", "two", **OF_TURNS), spoken(chat, 2, "three")], chat)
    strange = {
        "rollout_id": "9-1",
        "environment": "toy",
        "turns": [{"reward": "1", "advantage": [1]}, {"reward": True}],
    }
    write_lines(tmp_path / "job", "one", 2, orjson.dumps(strange) + b"\n")
    async with api(tmp_path / "job") as client:
        found = []
        for place in ("1/rollouts/0", "1/rollouts/1", "2/rollouts/0"):
            _, answer = await client.get(f"{RUN}/steps/{place}")
            found.append([(turn["reward"], turn["advantage"]) for turn in answer["parts"]["turns"]])
    assert found == [[(0.25, 0.5), (-1.0, 0.0)], [(None, None)], [(None, None), (1.0, None)]]


async def test_one_rollout_is_shown_turn_by_turn_and_as_text(job: Path) -> None:
    async with api(job) as client:
        _, answer = await client.get(f"{RUN}/steps/3/rollouts/1")
        turns = answer["parts"]["turns"]
        assert [turn["completion"]["text"] for turn in turns] == ["one</s>", "two words</s>"]
        assert [turn["player"] for turn in turns] == ["white", "white"]
        assert "and then?" in turns[1]["prompt"]["text"]
        assert (turns[0]["policy_version"], turns[0]["finish_reason"], turns[0]["completion_tokens"]) == (2, "stop", 4)
        _, answer = await client.get(f"{RUN}/steps/3/rollouts/0")
        assert answer["parts"]["state"] == [{"name": "answer", "value": "42"}]
        _, answer = await client.get(f"{RUN}/steps/3/rollouts/3", characters=100)
        said = answer["parts"]["turns"][0]["completion"]
        assert "<script>alert(1)</script>\\x1b[2J\\u202eevil\\u202c\\x00" in said["text"]
        assert answer["parts"]["error"]["characters"] == len(f"ValueError: {HOSTILE}")
        _, answer = await client.get(f"{RUN}/steps/3/rollouts/0/turns/0/tokens")
        assert "".join(answer["texts"]) == "so-so ☂</s>"
        assert len({len(answer[name]) for name in ("texts", "token_ids", "positions", "trained", "trainer")}) == 1


async def test_what_is_not_there_is_a_404(job: Path) -> None:
    (job / "run_link").symlink_to(job / "run_one")
    async with api(job) as client:
        for path in (
            "/jobs/job/runs/two/rollouts", "/jobs/job/runs/link/rollouts", "/jobs/none/runs/one/rollouts",
            f"{RUN}/steps/9/rollouts/0", f"{RUN}/steps/3/rollouts/6", f"{RUN}/steps/3/rollouts/6/turns/0/tokens",
            f"{RUN}/rollouts?step=9", "/jobs/job/runs/two/rollouts/search?text=a",
            "/jobs/job/runs/two/example?environment=a&example_index=0",
        ):  # fmt: skip
            response = await client.request("GET", f"/api/v1{path}")
            assert response.status == 404, path
        for path in (
            f"{RUN}/rollouts?limit=1000",
            f"{RUN}/rollouts/search?text=a&go_on=1-2",
            f"{RUN}/rollouts?least_reward=nan",
        ):
            assert (await client.request("GET", f"/api/v1{path}")).status == 400, path


HOSTILE_LINES = [
    b"",
    b"[]",
    b"null",
    b"\xff\xfe not utf-8",
    b'{"rollout_id": "\xff"}',
    b'{"a": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    b'{"state": ' + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}",
    b'{"turns": {"a": 1}, "reward": 1e999, "error": 5, "environment": ["x"], "example_index": 123456789012345678901234567890}',
    b'{"turns": [null, 1, [], {"prompt": 5, "completion": ["x"], "policy_version": "9", "server": 1, "player": {}}]}',
    orjson.dumps({"environment": "\u202e" * 500, "turns": [{"player": str(n)} for n in range(3000)], "metrics": {"": None}}),
    orjson.dumps({"turns": [{"completion": "x" * 300_000}, {"completion": "\u0007" * 9000}], "reward": True, "error": "e"}),
    b'{"reward": 1, "example_index": 1, "metrics": {"a": 1}, "turns": [{"completion_tokens": 1}]}'.replace(b"1", b"9" * 400),
    b'{"reward": -1e308, "advantage": "NaN", "turns": [{"completion_tokens": 1e300, "prompt_tokens": -5}]}',
]  # fmt: skip


async def test_no_line_keeps_the_others_from_being_shown(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(job, "one", 4, b"".join(line + b"\n" for line in HOSTILE_LINES) + b'{"torn": ')
    monkeypatch.setattr(view, "ANSWER_CHARACTERS", 50_000)
    async with api(job) as client:
        status, answer = await client.get(f"{RUN}/rollouts", sort="longest")
        assert (status, answer["of"]) == (200, len(HOSTILE_LINES))
        assert answer["progress"]["problems"] == [
            f"step 4: the file ends within a line, after {sum(len(line) + 1 for line in HOSTILE_LINES)} bytes"
        ]
        damaged = sorted(entry["number"] for entry in answer["rollouts"] if entry["outcome"] == "damaged")
        assert damaged == [0, 1, 2, 3, 4, 5, 7], "a number that is too large is no JSON to the parser"
        for number in range(len(HOSTILE_LINES)):
            response = await client.request("GET", f"/api/v1{RUN}/steps/4/rollouts/{number}?characters=1000000")
            body = await response.read()
            assert response.status == 200
            assert len(body) < 1_500_000
            assert (orjson.loads(body)["parts"] is None) == (number in damaged)
            assert "\u202e".encode() not in body
            assert b"\\u202e" not in body.replace(b"\\\\u202e", b""), "not even escaped by JSON, but as text"
        status, answer = await client.get(f"{RUN}/rollouts/search", text="x" * 50)
        assert (status, [hit["rollout"]["number"] for hit in answer["hits"]]) == (200, [10])


@pytest.mark.slow
async def test_ten_megabytes_in_one_line_are_shown_in_part(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "INDEX_SECONDS", 60.0)
    line = orjson.dumps({"rollout_id": "0-0", "turns": [{"completion": "<b>" + "y" * 10_000_000}], "reward": 1})
    too_long = orjson.dumps({"turns": [{"completion": "z" * line_index.MAX_LINE_BYTES}]})
    write_lines(job, "one", 4, line + b"\n" + too_long + b"\n")
    async with api(job) as client:
        _, answer = await client.get(f"{RUN}/rollouts")
        assert [entry["outcome"] for entry in answer["rollouts"]] == ["completed", "damaged"]
        assert [entry["beginning"] for entry in answer["rollouts"]] == ["", ""], "they are not read for a list"
        _, answer = await client.get(f"{RUN}/steps/4/rollouts/0")
        text = answer["parts"]["turns"][0]["completion"]
        assert (text["characters"], text["left_out"]) == (10_000_003, 9_980_003)
        assert text["text"].startswith("<b>yyy")
        _, answer = await client.get(f"{RUN}/steps/4/rollouts/1")
        assert answer["damaged"]["left_out"] > 16_000_000


async def test_a_search_ends_in_time_and_goes_on(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_search, "SEARCH_SECONDS", -1.0)
    async with api(job) as client:
        hits, asked, query = [], 0, {"text": "attempt"}
        while True:
            status, answer = await client.get(f"{RUN}/rollouts/search", **query)
            assert (status, answer["searched"]) == (200, 1)
            hits += [(hit["rollout"]["step"], hit["rollout"]["number"], hit["turn"]) for hit in answer["hits"]]
            asked += 1
            if answer["go_on"] is None or asked == 8:
                break
            query["go_on"] = answer["go_on"]
        assert hits == [(3, 4, 0), (2, 0, 0), (1, 0, 0)]
        status, answer = await client.get(f"{RUN}/rollouts/search", text="attempt", first_step=1, last_step=1)
        assert [(hit["rollout"]["step"], hit["found"]) for hit in answer["hits"]] == [(1, "attempt")]


async def test_an_example_is_followed_across_steps(job: Path, chat: Chat) -> None:
    both = [
        spoken(chat, 7, "a", reward=0.0),
        spoken(chat, 7, "b", reward=1.0),
        spoken(chat, 7, "c", reward=None, error="e"),
    ]
    write_step(job, "one", 4, both, chat)
    async with api(job) as client:
        status, answer = await client.get(f"{RUN}/example", environment="toy", example_index=7)
        assert status == 200
        assert answer["progress"]["is_complete"]
        found = [(each["step"], each["mean"], each["count"], each["rewards"]) for each in answer["by_step"]]
        assert found[:3] == [(1, 0.1, 1, [0.1]), (2, 0.2, 1, [0.2]), (3, 0.9, 1, [0.9])]
        assert found[3] == (4, 0.5, 3, [0.0, 1.0, None])
        assert (answer["by_step"][3]["least"], answer["by_step"][3]["most"]) == (0.0, 1.0)
        _, answer = await client.get(f"{RUN}/example", environment="toy", example_index=99)
        assert answer["by_step"] == []


async def test_a_list_of_what_is_not_indexed_says_so_and_goes_on(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.serve.api.rollouts.INDEX_SECONDS", -1.0)
    async with api(job) as client:
        seen = []
        for limit in range(1, 9):  # another question each time, so that no answer is a kept one
            _, answer = await client.get(f"{RUN}/rollouts", limit=limit)
            seen.append((answer["of"], answer["progress"]["is_complete"]))
    assert seen[:6] == [(1, False), (2, False), (3, False), (4, False), (5, False), (6, True)]
    assert seen[6:] == [(6, True), (6, True)]
