"""`single-turn`: data, template and rubric from a configuration file."""

from __future__ import annotations

import datetime as dt
import json
import tomllib
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.environments.chat import Chat
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.rewards.single_turn import SingleTurn
from counterpoint.environments.rewards.template import Template
from counterpoint.environments.scripted import play
from counterpoint.environments.workers.load import load_environment

REPOSITORY = Path(__file__).parents[3]
ROWS = {"rows": [{"question": "2 + 2", "answer": "#### 4", "n": 3}, {"question": "{n}", "answer": "#### 1\n#### 2"}]}
RUBRIC = [{"kind": "exact", "weight": 2.0}]
JUDGE = {"kind": "judge", "base_url": "http://127.0.0.1:9/v1", "model": "some"}


def load(**args: Any) -> Any:
    return load_environment(
        EnvironmentConfig(name="mine", kind="single-turn", args={"data": ROWS, "rubric": RUBRIC} | args)
    )


async def test_a_row_is_an_example_and_the_rubric_its_reward(chat: Chat) -> None:
    environment = load(prompt="What is {question}?", system="Be brief.", answer_pattern="#### (.+)")
    rollout = await play(environment, 0, chat, "4")
    prompt = chat.decode(rollout.turns[0].prompt_ids.tolist())
    assert "Be brief." in prompt
    assert "What is 2 + 2?" in prompt
    assert rollout.reward == 2.0
    assert rollout.metrics == {"total": 2.0, "exact": 1.0}
    assert rollout.state == {"completion": "4"}
    example = environment.example(1)
    assert (example.prompt, example.answer, example.info) == ("What is {n}?", "2", ROWS["rows"][1])
    assert len(environment) == 2
    with pytest.raises(IndexError):
        environment.example(2)
    assert (await play(environment, 1, chat, "3")).reward == 0.0
    assert environment.fingerprint == load(prompt="x").fingerprint
    await environment.close()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"prompt": "{qestion}"}, r"rows\[0\] has no column 'qestion' for `prompt`.*doubled"),
        ({"system": "{who}"}, "no column 'who' for `system`"),
        ({"answer": "anwser"}, "no column 'anwser'; did you mean 'answer'"),
        ({"answer": "n", "answer_pattern": "x"}, "finds nothing in '3'"),
        ({"answer_pattern": "("}, "args"),
        ({"data": {"rows": [{"question": "?", "answer": []}]}}, "is list; expected text"),
        ({"data": {"rows": [{"question": "?", "answer": {"a": 1}}]}}, "is dict; expected text"),
        ({"data": {"rows": [{"question": "?", "answer": None}]}}, "is NoneType; expected text"),
        ({"data": {"rows": [{"question": "?", "answer": float("inf")}]}}, "is infinity; expected text"),
        ({"data": {"path": "/no/such.jsonl"}}, "such.jsonl"),
        ({"rubric": [{"kind": "exakt"}]}, r"rubric\[0\].*exakt"),
        ({"rubric": []}, "0 parts"),
        ({"rubric": [{"kind": "exact", "answers_column": "anser"}]}, "part 'exact': .*'anser'; did you mean 'answer'"),
        ({"rubric": [{"kind": "code", "style": "stdio"}]}, "part 'code': there is no column 'tests'"),
        ({"rubric": [JUDGE | {"prompt": "{completion} {hints}"}]}, "part 'judge': there is no column 'hints'"),
    ],
)
def test_what_is_wrong_is_said_at_the_start(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)environment 'mine'.*{message}"):
        load(**args)


def test_an_environment_without_answers() -> None:
    assert load(answer="").example(0).answer == ""


@pytest.mark.slow
async def test_the_example_configuration_scores(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    table = tomllib.loads((REPOSITORY / "configs/rewards.toml").read_text())
    (config,) = table["orchestrator"]["environments"]
    environment = load_environment(EnvironmentConfig.model_validate(config))
    assert isinstance(environment, SingleTurn)
    right = f"3 + 4 = 7\nAnswer: {environment.example(0).answer}"
    rollout = await play(environment, 0, chat, right)
    assert rollout.reward == pytest.approx(1.2)
    assert {name: rollout.metrics[name] for name in ("math", "format", "words")} == {"math": 1, "format": 1, "words": 7}
    assert (await play(environment, 1, chat, right)).reward == pytest.approx(0.2)
    assert (await play(environment, 1, chat, "")).reward == 0.0
    await environment.close()


def test_templates_put_values_in_once() -> None:
    template = Template(r"{a} {{b}} \boxed{} {c}", "prompt")
    assert template.fields == {"a", "c"}
    for missing, said in (
        (None, "is null"),
        (float("nan"), "is NaN"),
        ([[float("inf")]], "holds infinity"),
        ({"x": b""}, "holds bytes"),
    ):
        with pytest.raises(ValueError, match=rf"row: .*'a' for `prompt` {said}"):
            template.fill({"a": missing, "c": ""}, "row")
    assert template.fill({"a": "x", "c": [None]}, "row").endswith("[null]")
    assert template.fill({"a": "{c}", "c": [1, "é"]}, "row") == r'{c} {b} \boxed{} [1, "é"]'


@pytest.mark.parametrize(
    "written",
    ["1180591620717411303425", "-18446744073709551616", "0.10", "2.50", "1e3", "3.14159265358979323846", "7", "0.1"],
)
async def test_numbers_of_a_file_are_compared_and_asked_for_as_they_are_written(
    chat: Chat, tmp_path: Path, written: str
) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"question": {written}, "answer": {written}, "tests": [{written}]}}\n')
    environment = load(data={"path": str(tmp_path / "a.jsonl")})
    example = environment.example(0)
    assert (example.prompt, example.answer, example.info["answer"]) == (written, written, json.loads(written))
    assert (await play(environment, 0, chat, written)).reward == 2.0
    assert (await play(environment, 0, chat, str(float(written)) + "1")).reward == 0.0
    await environment.close()


def test_times_of_parquet_are_text_and_bytes_are_refused_by_name(tmp_path: Path) -> None:
    import pyarrow.parquet

    row = {"question": dt.date(2024, 1, 2), "at": dt.datetime(2024, 1, 2, 3), "answer": dt.time(3, 4), "raw": b"x"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    data = {"path": str(tmp_path / "a.parquet")}
    example = load(data=data, prompt="{question} {at}").example(0)
    assert (example.prompt, example.answer) == ("2024-01-02 2024-01-02T03:00:00", "03:04:00")
    for args, message in (
        ({"prompt": "{raw}"}, "'raw' for `prompt` is bytes"),
        ({"answer": "raw"}, "'raw' .* is bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            load(data=data, **args)


def test_decimals_of_parquet_are_text_with_all_their_digits(tmp_path: Path) -> None:
    import pyarrow.parquet

    row = {"question": Decimal("2.50"), "answer": Decimal("1180591620717411303425")}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
    example = load(data={"path": str(tmp_path / "a.parquet")}).example(0)
    assert (example.prompt, example.answer) == ("2.50", "1180591620717411303425")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (True, "true"),
        (False, "false"),
        (7, "7"),
        (7.0, "7.0"),
        (-0.5, "-0.5"),
        (2**80, str(2**80)),
        ("True", "True"),
        ("", ""),
    ],
)
def test_an_answer_is_the_text_that_a_prompt_has(answer: Any, text: str) -> None:
    example = load(data={"rows": [{"answer": answer}]}, prompt="Say {answer}").example(0)
    assert (example.prompt, example.answer) == (f"Say {text}", text)


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"left": 1}}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}], "name": None},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"},
    {"role": "assistant", "content": "2", "tool_calls": None},
    {"role": "user", "content": "Times 3?"},
]


async def test_a_prompt_that_is_a_list_of_messages_is_the_conversation(chat: Chat) -> None:
    for talk in (TALK, TALK[:2], TALK[1:4], [TALK[5]], json.dumps(TALK), json.dumps(TALK[:2], indent=1)):
        environment = load(data={"rows": [{"talk": talk, "answer": "6"}]}, prompt=" {talk}\n")
        rollout = await play(environment, 0, chat, "6")
        messages = json.loads(talk) if isinstance(talk, str) else talk
        plain = [{**each, "content": "1 + 1?"} if isinstance(each["content"], list) else each for each in messages]
        expected = [{name: value for name, value in each.items() if value is not None} for each in plain]
        assert rollout.turns[0].prompt_ids.tolist() == chat.start(expected)
        assert rollout.reward == 2.0
    assert load(data={"rows": [{"talk": [TALK[5]], "answer": "6"}]}, prompt="{talk}").example(0).prompt == "Times 3?"
    environment = load(data={"rows": [{"talk": TALK[1:], "answer": "6"}]}, prompt="{talk}", system="Answer {answer}.")
    begun = chat.decode((await play(environment, 0, chat, "6")).turns[0].prompt_ids.tolist())
    assert "Answer 6." in begun
    assert "Times 3?" in begun


@pytest.mark.parametrize(
    ("talk", "args", "message"),
    [
        (TALK, {"system": "Another."}, "'talk' has a system message, and `system` is another"),
        (TALK, {"prompt": "Go: {talk}"}, "'talk', a list of messages, can be no part of a text"),
        (TALK, {"prompt": "{answer}", "system": "{talk}"}, "'talk', a list of messages, can be no part of a text"),
        (TALK[:5], {}, "'talk', .*ends with the assistant's"),
        ([{"from": "human", "value": "1 + 1?"}], {}, r"'talk', .*messages\[0\].role is None"),
        ([*TALK[:2], {"text": "?"}], {}, r"'talk', .*messages\[2\].role is None"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            {},
            r"'talk', .*content\[0\] is 'image_url'; only .*text",
        ),
        ([{"role": "user", "content": 7}], {}, r"'talk', .*messages\[0\].content is 7"),
        (TALK[5], {}, "'talk' holds messages, and is no list of them"),
        ({"messages": TALK}, {}, "'talk' holds messages"),
        ([TALK], {}, "'talk' holds messages"),
        ([], {}, "'talk' holds messages"),
    ],
)
def test_a_list_of_messages_that_cannot_be_played_is_refused_by_its_column(
    talk: Any, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        load(**{"data": {"rows": [{"talk": talk, "answer": "6"}]}, "prompt": "{talk}"} | args)


@pytest.mark.parametrize("value", ['[{"a": 1}]', "[", "[1, 2]", '{"role": "user", "content": "?"}'])
def test_other_text_stays_text(value: str) -> None:
    assert load(data={"rows": [{"talk": value, "answer": "6"}]}, prompt="{talk}").example(0).prompt == value
    quoted = json.dumps(TALK)
    assert (
        load(data={"rows": [{"talk": quoted, "answer": "6"}]}, prompt="Go: {talk}").example(0).prompt == f"Go: {quoted}"
    )


@settings(max_examples=100)
@given(st.text(max_size=40), st.dictionaries(st.sampled_from("abc"), st.text(max_size=10)))
def test_a_template_never_reads_a_value(text: str, values: dict[str, str]) -> None:
    doubled = text.replace("{", "{{").replace("}", "}}")
    assert Template(doubled, "prompt").fill(values, "row") == text
    assert Template("<{a}>", "prompt").fill({"a": text}, "row") == f"<{text}>"
