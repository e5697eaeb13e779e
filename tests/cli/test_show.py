"""`counterpoint show`: the rollouts of a step, listed or in whole, and nothing in them that a terminal would act on."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from counterpoint.cli.show import main
from counterpoint.environments.chat import Chat
from counterpoint.orchestrator.rollouts.transcripts import Transcriber
from counterpoint.orchestrator.step.records import write_records
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import publish_directory
from counterpoint.transport.printable import printable
from counterpoint.transport.records import OpponentTurn, Rollout
from tests.orchestrator.toy_model import make_toy_model
from tests.serve.rollouts.jobs import OF_TURNS
from tests.support.rollouts import make_rollout, make_turn

HOSTILE = "\x1b]0;title\x07\x1b[2J[red]not markup[/red]\rreward 1\u202eevil\u202c\nrollout 9-9 of run one"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat(make_toy_model(tmp_path_factory.mktemp("model")))


def write_step(job: Path, run_id: str, step: int, rollouts: list[Rollout], chat: Chat | None = None) -> None:
    with publish_directory(job / f"run_{run_id}" / "rollouts" / f"step_{step}") as directory:
        transcribe = Transcriber(chat.transcribe, 4096) if chat is not None else None
        write_records(directory / "rollouts.jsonl", rollouts, {"toy": ["answer"]}, transcribe)


def spoken(chat: Chat, group: int, *said: str, **fields: Any) -> Rollout:
    turns, prompt = [], chat.start([{"role": "user", "content": f"question {group}"}])
    for answer in said:
        turns.append(replace(make_turn(prompt, [*chat.encode(answer), *chat.stop_token_ids]), policy_version=2))
        prompt = list(chat.extend(turns[-1], [{"role": "user", "content": "and then?"}]))
    return make_rollout(group, 0, turns=turns, **fields)


@pytest.fixture
def job(tmp_path: Path, chat: Chat) -> Path:
    rollouts = [
        spoken(chat, 0, "so-so", reward=0.5, advantage=0.1),
        spoken(chat, 1, "one", "two", reward=0.75, advantage=0.25, state={"answer": "two"}),
        spoken(chat, 2, "bad", reward=-1.0, advantage=-0.5, filtered_by="repetition"),
        spoken(chat, 3, HOSTILE, reward=None, error=f"ValueError: {HOSTILE}"),
    ]
    write_step(tmp_path, "one", 3, rollouts, chat)
    write_step(tmp_path, "one", 2, [spoken(chat, 7, "earlier", reward=0.0)], chat)
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_the_best_rollout_of_the_newest_step_in_whole(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, job, "--best").splitlines() == [
        "rollout 1-0 of run one, step 3: example 1 of toy",
        "reward 0.75, advantage +0.25, trained",
        'state {"answer":"two"}',
        "turn 1 of 2, prompt: 29 tokens",
        "    <s>user",
        "    question 1</s>",
        "    <s>assistant",
        "    ",
        "turn 1 of 2, completion: 4 tokens, stop, policy 2",
        "    one</s>",
        "turn 2 of 2, prompt: 62 tokens",
        "    ",
        "    <s>user",
        "    and then?</s>",
        "    <s>assistant",
        "    ",
        "turn 2 of 2, answer: 4 tokens, stop, policy 2",
        "    two</s>",
    ]


def test_players_and_opponents_are_shown_where_they_spoke(
    tmp_path: Path, chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout = spoken(chat, 1, "one", "two", player_rewards={"white": 1.0}, player_advantages={"white": 0.5})
    rollout.turns = [replace(turn, player="white") for turn in rollout.turns]
    rollout.opponent_turns = [
        OpponentTurn("frozen", before, said) for before, said in ((0, "hm"), (1, "oh"), (2, "ah"))
    ]
    write_step(tmp_path, "one", 1, [rollout], chat)
    lines = shown(capsys, tmp_path, "--best").splitlines()
    assert 'player_rewards {"white":1.0}' in lines
    spoke = [line.split(",")[0].strip() for line in lines if line.startswith(("turn", "opponent"))]
    policy = ["turn 1 of 2", "turn 1 of 2", "opponent frozen", "turn 2 of 2", "turn 2 of 2", "opponent frozen"]
    assert spoke == ["opponent frozen", *policy]
    assert [line.strip() for line in lines if line.strip() in ("hm", "oh", "ah")] == ["hm", "oh", "ah"]
    assert any(line.startswith("turn 1 of 2, white, completion") for line in lines)


def test_a_turn_has_its_reward_and_advantage_beside_it(
    tmp_path: Path, chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    write_step(tmp_path, "one", 1, [spoken(chat, 1, "one", "two", reward=-0.75, **OF_TURNS)], chat)
    lines = shown(capsys, tmp_path, "--best").splitlines()
    assert [line for line in lines if line.startswith(("turn 1 of 2, completion", "turn 2 of 2, answer"))] == [
        "turn 1 of 2, completion: 4 tokens, stop, policy 2, reward 0.25, advantage +0.5",
        "turn 2 of 2, answer: 4 tokens, stop, policy 2, reward -1, advantage +0",
    ]


def test_the_worst_and_its_filter(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = shown(capsys, job, "--worst")
    assert "reward -1, advantage -0.5, filtered by repetition" in said
    assert "    bad</s>" in said


@pytest.mark.parametrize("dropped", ["stale", "incomplete"])
def test_a_rollout_whose_group_was_dropped_was_not_trained(
    tmp_path: Path, chat: Chat, capsys: pytest.CaptureFixture[str], dropped: str
) -> None:
    write_step(tmp_path, "one", 1, [spoken(chat, 0, "old", reward=1.0, dropped=dropped)], chat)
    for arguments in ((), ("--best",)):
        said = shown(capsys, tmp_path, *arguments)
        assert f"its group was dropped ({dropped})" in said


def test_an_earlier_step_and_a_rollout_by_its_id(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "    earlier</s>" in shown(capsys, job, "--step", 2, "--worst")
    assert "    so-so</s>" in shown(capsys, job, "--step", 3, "--rollout", "0-0")


def test_without_a_choice_all_are_listed_best_first(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line.split() for line in shown(capsys, job).splitlines() if re.match(r" +\d-0", line)]
    assert [row[0] for row in rows] == ["1-0", "0-0", "2-0", "3-0"]
    assert rows[0][1:] == ["toy", "1", "0.75", "+0.25", "2", "8", "trained"]
    assert rows[2][-3:] == ["filtered", "by", "repetition"]
    assert "failed:" in rows[3]


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("which", [("--rollout", "3-0"), ()])
def test_hostile_text_is_only_shown(
    job: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
    which: tuple[str, ...],
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "200")
    said = shown(capsys, job, *which)
    assert ("\x1b[" in said) == terminal
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said)
    assert all(letter.isprintable() or letter == "\n" for letter in plain)
    assert "\\x1b]0;title\\x07\\x1b[2J[red]not markup[/red]\\rreward 1\\u202eevil\\u202c" in plain
    # None of its lines begins where ours do.
    assert not any(line.startswith("rollout 9-9") for line in plain.splitlines())


@pytest.mark.parametrize("text", ["naïve ☂ 日本\tx\n", "a\x00b\x7f\x9b\u2028\u200b\ufeff"])
def test_what_people_write_stays_and_the_rest_is_escaped(text: str) -> None:
    escaped = printable(text)
    assert (escaped == text) == text.startswith("naïve")
    assert all(letter.isprintable() or letter in "\n\t" for letter in escaped)


def test_records_without_text_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_step(tmp_path, "one", 1, [make_rollout()])
    assert shown(capsys, tmp_path, "--best").count("no text was recorded") == 2


def test_of_several_runs_one_is_named(job: Path, chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    write_step(job, "two", 1, [spoken(chat, 0, "other", reward=1.0)], chat)
    with pytest.raises(UserError, match="holds 2 runs; name one with --run: one, two"):
        main([str(job), "--best"])
    assert "    other</s>" in shown(capsys, job, "--run", "two", "--best")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--step", "9"], "has no rollouts of step 9; it has steps 2 to 3"),
        (["--run", "../x"], r"there is no run '../x' in .*: its runs are one"),
        (["--rollout", "8-8"], "has no rollout '8-8'"),
    ],
)
def test_what_is_not_there_is_named(job: Path, arguments: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        main([str(job), *arguments])


def test_where_there_is_nothing_to_show(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        main([str(tmp_path / "gone")])
    with pytest.raises(UserError, match="holds no run"):
        main([str(tmp_path)])
    write_step(tmp_path, "one", 1, [make_rollout(reward=None, error="broken")])
    with pytest.raises(UserError, match="no rollout of run one, step 1 has a reward"):
        main([str(tmp_path), "--best"])
    (tmp_path / "run_two").mkdir()
    with pytest.raises(UserError, match="has shipped no step yet"):
        main([str(tmp_path), "--run", "two"])
    (tmp_path / "run_two" / "sft.json").write_text("{}")
    with pytest.raises(UserError, match="is supervised fine-tuning"):
        main([str(tmp_path), "--run", "two"])


def publish(job: Path, *lines: bytes) -> Path:
    """A step whose records are these lines, whatever they are."""
    directory = job / "run_one/rollouts/step_1"
    directory.mkdir(parents=True)
    (directory / "STABLE").touch()
    (directory / "rollouts.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    return directory / "rollouts.jsonl"


@pytest.mark.parametrize(
    "line",
    [
        b'{"turns": 3, "reward": "0.7", "rollout_id": ["x"]}',
        b'{"turns": [1, {"prompt": 7}], "state": []}',
        b'{"turns": [{"player": [1]}], "opponent_turns": [1, {"before": "x", "completion": 3}, {}]}',
        b'{"opponent_turns": 7}',
        b'{"reward": -1e300, "metrics": {"x": ' + b"[" * 300 + b"]" * 300 + b"}}",
    ],
)
def test_a_record_of_anything_is_shown(tmp_path: Path, line: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """A guest's orchestrator may have written it."""
    publish(tmp_path, line, orjson.dumps({"reward": 1, "rollout_id": "good"}))
    assert "good" in shown(capsys, tmp_path)
    assert "rollout good of run one" in shown(capsys, tmp_path, "--best")
    assert "rollout ? of run one" in shown(capsys, tmp_path, "--rollout", "?")


@pytest.mark.parametrize("line", [b"[]", b"{", b"[" * 10_000])
def test_what_is_no_record_is_named_by_its_line(tmp_path: Path, line: bytes) -> None:
    publish(tmp_path, b"{}", line)
    with pytest.raises(UserError, match=r"rollouts\.jsonl:2: "):
        main([str(tmp_path)])


def test_a_fifo_in_place_of_records_is_not_waited_for(tmp_path: Path) -> None:
    path = publish(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match="is a FIFO"):
        main([str(tmp_path)])


def said_by(turns: list[dict[str, Any]], **fields: Any) -> bytes:
    return orjson.dumps({"rollout_id": "0-0", "environment": "toy", "example_index": 0, "turns": turns} | fields)


CONVERSATION = said_by(
    [
        {
            "prompt": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n",
            "completion": "<tool_call>{}</tool_call><|im_end|>",
            "prompt_tokens": 9,
        },
        {
            "prompt": "\n<|im_start|>user\n<tool_response>4</tool_response><|im_end|>\n<|im_start|>assistant\n",
            "completion": "5<|im_end|>",
        },
    ],
    reward=0.0,
    answer="4",
    state={"tries": ["5"]},
)


def test_a_conversation_is_shown_as_one_beside_the_right_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(tmp_path, CONVERSATION)
    lines = shown(capsys, tmp_path, "--best").splitlines()
    assert lines[1:] == [
        "reward 0, advantage none, trained",
        "right answer",
        "    4",
        'state {"tries":["5"]}',
        "turn 1 of 2, system",
        "    Be brief.",
        "turn 1 of 2, user",
        "    2 + 2?",
        "turn 1 of 2, completion: None tokens, None, policy None",
        "    <tool_call>{}</tool_call>",
        "turn 2 of 2, tool",
        "    4",
        "turn 2 of 2, answer: None tokens, None, policy None",
        "    5",
    ]
    said = shown(capsys, tmp_path, "--best", "--tokens")
    assert "turn 1 of 2, prompt: 9 tokens" in said
    assert "    <|im_start|>user" in said
    assert "    5<|im_end|>" in said


def test_the_worst_is_also_looked_for_in_what_was_dropped_since(
    job: Path, chat: Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    worse = said_by([], rollout_id="9-9", reward=-2.0, filtered_by="zero_advantage")
    for name in ("discarded.jsonl", "no_difference.jsonl"):
        (job / "run_one" / name).write_bytes(worse + b"\n")
        said = shown(capsys, job, "--worst")
        assert "rollout 9-9 of run one, step 3 and what was dropped since" in said
        assert "reward -2, advantage none, filtered by zero_advantage" in said
        assert "rollout 2-0" in shown(capsys, job, "--step", 3, "--worst")
        assert "rollout 1-0" in shown(capsys, job, "--best")


def test_what_was_dropped_is_shown_before_the_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run_one").mkdir()
    failed = said_by([], reward=None, error="KeyError: 'x' (in score, my.py:3)", answer="4")
    (tmp_path / "run_one" / "discarded.jsonl").write_bytes(failed + b"\n")
    said = shown(capsys, tmp_path, "--worst")
    assert "rollout 0-0 of run one, some of what was dropped before its first step" in said
    assert "failed: KeyError: 'x' (in score, my.py:3)" in said
    assert "failed: KeyError" in shown(capsys, tmp_path)


def test_groups_without_a_difference_are_those_that_are_said_or_those_of_the_newest_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def group(number: int, *rewards: float | None) -> list[Rollout]:
        return [make_rollout(number, index, reward=reward) for index, reward in enumerate(rewards)]

    write_step(tmp_path, "one", 1, [*group(0, 0.0, 1.0), *group(1, 1.0, 1.0), *group(2, 0.0, 0.0)])
    said = shown(capsys, tmp_path, "--no-difference")
    heads = [line for line in said.splitlines() if line.startswith("rollout")]
    assert [head.split()[1] for head in heads] == ["2-0", "1-0"], "the worst first"
    assert "step 1, of whose 3 groups 2 have equal rewards" in heads[0]
    (tmp_path / "run_one" / "no_difference.jsonl").write_bytes(said_by([], rollout_id="7-7") + b"\n")
    assert "rollout 7-7 of run one, a group without a difference" in shown(capsys, tmp_path, "--no-difference")
    (tmp_path / "run_one" / "no_difference.jsonl").unlink()
    write_step(tmp_path, "one", 2, group(0, 0.0, 1.0))
    with pytest.raises(UserError, match="differ within each of the 1 groups of step 2"):
        main([str(tmp_path), "--no-difference"])
    damaged = tmp_path / "run_one" / "rollouts" / "step_2" / "rollouts.jsonl"
    damaged.write_bytes(said_by([], rollout_id="8-8", group_id=[8], reward=0.0) + b"\n")
    assert "rollout 8-8 of run one, step 2" in shown(capsys, tmp_path, "--no-difference")
