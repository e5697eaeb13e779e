"""Single tokens: written beside the records within their bounds, read without trust, and joined with the trainer's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.environments.chat import Chat
from counterpoint.job.reading.rollouts.rollout_records import read_records
from counterpoint.job.reading.rollouts.step_indexes import moment
from counterpoint.job.reading.rollouts.tokens import TokensAnswer, _decoded, tokenizer_of, turn_tokens
from counterpoint.orchestrator.rollouts.token_file import TOKENS_FILE, TokenFileError, read_tokens
from counterpoint.transport.files.atomic import remove_directory
from counterpoint.transport.records import Rollout
from tests.orchestrator.toy_model import make_toy_model
from tests.serve.rollouts.jobs import name_model, spoken, write_lines, write_step
from tests.support.rollouts import make_rollout, make_turn


def read(job: Path, step: int, number: int, turn: int, begin: int = 0, most: int = 4096) -> TokensAnswer:
    record = list(read_records(job, "one", step))[number]
    return turn_tokens(job, "one", step, number, record, turn, begin, most, moment(60))


def test_each_token_has_its_text_and_its_log_probability(job: Path) -> None:
    found = read(job, 3, 0, 0)
    assert "".join(found.texts) == "so-so ☂</s>"
    umbrella = found.texts[6:9]
    assert umbrella == ["", "", "☂"], "one character of three tokens"
    assert found.log_probabilities == pytest.approx([-0.01 * n for n in range(1, 11)])
    assert (found.missing, found.no_text, found.total, found.recorded) == ("", "", 10, 10)
    assert "token_export is off" in found.no_trainer
    second = read(job, 3, 1, 1, begin=4, most=2)
    assert (second.positions, second.texts) == ([4, 5], ["w", "o"])


@pytest.mark.slow
@settings(max_examples=25)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 30)), max_size=4),
    budget=st.integers(1, 60),
    data=st.data(),
)
def test_the_tokens_are_those_of_the_text(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[tuple[int, int]], budget: int, data: st.DataObject
) -> None:
    """What is kept of a long rollout is what its text has, with its own values; a token is never taken for another."""
    job = tmp_path_factory.getbasetemp() / "kept-job"
    chat = Chat(make_toy_model(tmp_path_factory.getbasetemp() / "kept-model"))
    turns = [
        make_turn([3] * prompt, list(range(3, 3 + completion)), log_probabilities=[-n / 8 for n in range(completion)])
        for prompt, completion in lengths
    ]
    for turn in turns:
        if len(turn.completion_ids) and data.draw(st.booleans()):
            turn.leave_untrained(0, 2)
    rollouts = [make_rollout(0), make_rollout(1, turns=turns)]
    remove_directory(job / "run_one/rollouts/step_1")
    path = write_step(job, "one", 1, rollouts, chat, budget)
    rollout_id, found = read_tokens(path.with_name(TOKENS_FILE), 1)
    assert rollout_id == "1-0"
    assert sum(len(turn.token_ids) for turn in found) <= budget
    text = [turn["completion"] for turn in orjson.loads(path.read_bytes().splitlines()[1])["turns"]]
    for turn, kept, said in zip(turns, found, text, strict=True):
        positions = kept.positions
        assert kept.total == len(turn.completion_ids)
        assert kept.token_ids.tolist() == turn.completion_ids[positions].tolist()
        assert kept.log_probabilities.tolist() == turn.log_probabilities[positions].tolist()
        untrained = np.frombuffer(bytes(turn.untrained) or bytes(kept.total), np.uint8)
        assert kept.untrained.tolist() == untrained[positions].tolist()
        head, tail = kept.token_ids[: kept.first].tolist(), kept.token_ids[kept.first :].tolist()
        assert said.startswith(chat.transcribe([head])[0])
        assert said.endswith(chat.transcribe([tail])[0])


def test_arrays_that_do_not_fit_each_other_keep_no_rollout_from_being_recorded(job: Path, chat: Chat) -> None:
    short = make_turn([1, 2], [3, 4, 5], log_probabilities=[-1.0])
    other = make_turn([1, 2], [3, 4])
    broken = make_rollout(0, turns=[short, other], reward=None, error="its arrays do not fit")
    write_step(job, "one", 4, [broken, spoken(chat, 1, "fine")], chat)
    assert "did not fit" in read(job, 4, 0, 0).missing
    assert read(job, 4, 0, 1).token_ids == [3, 4]
    assert "".join(read(job, 4, 1, 0).texts) == "fine</s>"


@pytest.mark.slow
@settings(max_examples=100)
@given(data=st.data())
def test_damage_is_found_and_nothing_else_happens(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    base = tmp_path_factory.getbasetemp()
    whole = base / "whole"
    if not whole.exists():
        chat = Chat(make_toy_model(base / "kept-model"))
        write_step(whole, "one", 1, [make_rollout(0), make_rollout(1), spoken(chat, 2, "a", "b")], chat)
    good = (whole / "run_one/rollouts/step_1" / TOKENS_FILE).read_bytes()
    damaged = bytearray(good[: data.draw(st.integers(0, len(good)))])
    for position in data.draw(st.lists(st.integers(0, max(0, len(damaged) - 1)), max_size=3)):
        if damaged:
            damaged[position] ^= data.draw(st.integers(1, 255))
    path = base / "damaged.bin"
    path.write_bytes(damaged)
    try:
        _, turns = read_tokens(path, data.draw(st.integers(0, 3)))
    except TokenFileError:
        pass  # what is damaged is said
    else:
        for turn in turns:
            assert len(turn.token_ids) == len(turn.log_probabilities) == len(turn.untrained) == len(turn.positions)


def test_why_there_are_none_is_said(job: Path, chat: Chat, tmp_path: Path) -> None:
    write_lines(job, "one", 5, orjson.dumps({"rollout_id": "0-0", "turns": [{}]}) + b"\n")
    assert f"has no {TOKENS_FILE}" in read(job, 5, 0, 0).missing
    control = job / "run_one" / "control"
    control.mkdir()
    (control / "orch.toml").write_text("recorded_tokens = 0\n[training]\ntoken_export = true\n")
    assert "recorded_tokens is 0" in read(job, 5, 0, 0).missing
    assert "not exported this step" in read(job, 3, 0, 0).no_trainer
    (job / "run_one/rollouts/step_5" / TOKENS_FILE).write_bytes(
        (job / "run_one/rollouts/step_3" / TOKENS_FILE).read_bytes()
    )
    assert read(job, 5, 0, 0).missing == "", "as many rollouts with the same ids cannot be told from it"
    assert "does not fit" in read(job, 5, 0, 7).missing
    name_model(job, tmp_path / "gone")
    found = read(job, 3, 0, 0)
    assert "tokenizer.json cannot be read" in found.no_text
    assert str(tmp_path) not in found.no_text
    assert found.texts[0] == f"[{found.token_ids[0]}]"


def write_export(job: Path, lines: list[dict[str, object]], rank: int = 0) -> None:
    directory = job / "trainer" / "tokens" / "one"
    directory.mkdir(parents=True, exist_ok=True)
    data = b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines)
    (directory / f"step_3.rank_{rank}.jsonl").write_bytes(data)


def exported(rollout: Rollout, turn: int, shift: float) -> dict[str, object]:
    """A line of `counterpoint/trainer/telemetry/token_export.py`, of the sample that ends with that turn."""
    position: list[int] = []
    ids: list[int] = []
    for each in rollout.turns[: turn + 1]:
        position += range(len(each.prompt_ids), len(each.prompt_ids) + len(each.completion_ids))
        ids += each.completion_ids.tolist()
    values = [shift - index / 100 for index in range(len(ids))]
    columns = {"position": position, "token_id": ids, "trainer_log_probability": values}
    return {"run_id": "one", "step": 3, "sample": 0, "rollout_id": rollout.rollout_id, **columns}


def test_the_trainers_values_are_joined_by_place_and_token(job: Path, chat: Chat) -> None:
    rollout = spoken(chat, 1, "one", "two words")
    other = spoken(chat, 0, "so-so ☂")
    write_export(job, [exported(other, 0, -9.0)], rank=1)
    write_export(job, [{"rollout_id": "1-0"}, exported(rollout, 1, -1.0)])
    first, second = read(job, 3, 1, 0), read(job, 3, 1, 1)
    assert (first.no_trainer, second.no_trainer) == ("", "")
    assert first.trainer == pytest.approx([-1.0, -1.01, -1.02, -1.03])
    assert second.trainer[0] == pytest.approx(-1.04)
    assert read(job, 3, 0, 0).trainer[0] == pytest.approx(-9.0)
    assert "no sample of this turn" in read(job, 3, 4, 0).no_trainer
    wrong = exported(rollout, 1, -1.0) | {"token_id": [0] * 30}
    write_export(job, [wrong])
    assert "no sample of this turn" in read(job, 3, 1, 1).no_trainer


def test_parts_of_characters_without_an_end_take_no_time_that_grows_with_their_square(job: Path, chat: Chat) -> None:
    part = chat.encode("☂")[0]
    texts = _decoded(tokenizer_of(job, "one"), [part] * 40 + chat.encode("ab") + [part, -1, 2**31 - 1])
    assert len(texts) == 45
    assert "".join(texts).count("\ufffd") >= 4
    assert "b" in "".join(texts)
