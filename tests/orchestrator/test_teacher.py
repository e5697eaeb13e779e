"""A teacher in a whole daemon: what it is asked, where its answers end up, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from counterpoint.environments.chat import Chat
from counterpoint.inference.base import RequestRefused, ServerFailure
from counterpoint.inference.pool.pool import InferencePool
from counterpoint.orchestrator.daemon import run
from counterpoint.orchestrator.rollouts.trajectories import OpenBranches
from counterpoint.orchestrator.run_directory import ConfigurationError
from counterpoint.orchestrator.teacher import Teacher, teacher_of
from counterpoint.run.config import RunConfig
from counterpoint.transport.records import TEACHER_LOG_PROBABILITIES, Float32Array, Int32Array, Rollout
from tests.orchestrator.daemons import STEPS, assert_whole, records_of
from tests.orchestrator.scripted_trainer import ScriptedTrainer
from tests.support.fake_inference import FakeInference
from tests.support.rollouts import make_rollout, make_turn

DISTILLING: dict[str, Any] = {"training": {"lora": {}, "loss": {"kind": "distillation"}}}


class Pool:
    """Answers -token / 100 for each token, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[tuple[list[int], int]] = []
        self._error = error

    async def score(self, token_ids: Int32Array, start: int, *, affinity: str) -> Float32Array:
        self.asked.append((token_ids.tolist(), start))
        if self._error is not None:
            raise self._error
        return token_ids[start:].astype(np.float32) / np.float32(-100)

    def forget_group(self, affinity: str) -> None:
        raise NotImplementedError

    async def detokenize(self, token_ids: list[int], affinity: str) -> str:
        assert self._error is not None, "nobody compares"
        raise self._error


def make_played() -> Rollout:
    """Two turns of one branch, and one of another, as `play.PolicyModel` leaves them."""
    branches = OpenBranches()
    turns = [
        branches.add(turn).turns[-1]
        for turn in (make_turn([1, 2], [3, 4]), make_turn([9], [8]), make_turn([1, 2, 3, 4, 5], [6]))
    ]
    rollout = make_rollout(turns=turns)
    rollout.branches = branches.closed()
    return rollout


async def test_a_branch_is_asked_for_at_once() -> None:
    pool, rollout = Pool(), make_played()
    await Teacher(pool).ask(rollout)
    assert pool.asked == [([1, 2, 3, 4, 5, 6], 2), ([9, 8], 1)]
    assert rollout.error is None
    columns = [turn.columns[TEACHER_LOG_PROBABILITIES].tolist() for turn in rollout.turns]
    assert columns == [pytest.approx([-0.03, -0.04]), pytest.approx([-0.08]), pytest.approx([-0.06])]


async def test_of_a_branch_of_empty_completions_nothing_is_asked() -> None:
    branches, pool = OpenBranches(), Pool()
    rollout = make_rollout(turns=[branches.add(make_turn([1, 2], [])).turns[-1]])
    rollout.branches = branches.closed()
    await Teacher(pool).ask(rollout)
    assert (rollout.error, pool.asked) == (None, [])
    assert [len(turn.columns[TEACHER_LOG_PROBABILITIES]) for turn in rollout.turns] == [0]


@pytest.mark.parametrize(("error", "excused"), [(ServerFailure("it is down"), True), (RequestRefused("no"), False)])
async def test_a_teacher_that_fails_fails_the_rollout(error: Exception, excused: bool) -> None:
    rollout = make_played()
    await Teacher(Pool(error)).ask(rollout)
    assert rollout.error == f"the teacher gave no log-probabilities: {error}"
    assert rollout.inference_failed is excused


@pytest.mark.slow
def test_a_run_with_a_teacher(make_config: Callable[..., RunConfig], inference: FakeInference) -> None:
    """Each trained token has the teacher's value; where it fails, that rollout alone does."""
    teacher = {"urls": [inference.url], "protocol": "binary", "model": "wise", "max_concurrent_requests": 3}
    config = make_config(teacher=teacher, **DISTILLING)
    inference.texts = lambda ids: Chat(config.model).transcribe([ids])[0]
    inference.score_status = lambda asked: 400 if len(inference.scored) % 7 == 3 else 200
    with ScriptedTrainer(config.output_dir, "one", STEPS) as trainer:
        assert run(config, lambda: None) == 0
    assert_whole(config)
    assert {asked.model for asked in inference.scored} == {"wise"}
    for batch in trainer.trained:
        expected = np.where(batch.loss_mask_T, batch.token_ids_T.astype(np.float32) / np.float32(-100), 0)
        np.testing.assert_array_equal(batch.columns[TEACHER_LOG_PROBABILITIES], expected)
    failed = [record for record in records_of(config) if record["outcome"] == "failed"]
    assert failed
    assert all("the teacher gave no log-probabilities" in record["error"] for record in failed)


async def test_another_tokenizer_is_refused(make_config: Callable[..., RunConfig], inference: FakeInference) -> None:
    config = make_config(teacher={"model": "wise"}, **DISTILLING)
    chat = Chat(config.model)
    inference.texts = lambda ids: chat.transcribe([ids])[0].replace("a", "b")
    with pytest.raises(ConfigurationError, match=r"^teacher: .*tokenizer.* 0 and "):
        async with teacher_of(config, chat, InferencePool(config.inference)):
            pass
    inference.texts = lambda ids: chat.transcribe([ids])[0] + "?"
    with pytest.raises(ConfigurationError, match=r"run.*''.*teacher.*'\?'"):
        async with teacher_of(config, chat, InferencePool(config.inference)):
            pass


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"training": {"loss": {"kind": "sft"}}},
            "imitates data, and a run's tokens are its own; use counterpoint sft",
        ),
        ({"training": {"loss": {"kind": "distillation"}}}, "needs a teacher; add"),
        ({"teacher": {"model": "wise"}}, r'training.loss.kind = "importance_ratio" does not use its answers'),
        ({"teacher": {"model": "one"}, **DISTILLING}, "teacher.model = 'one' names what this run trains"),
        (
            {"teacher": {}, "training": {"loss": {"kind": "distillation"}}},
            r"\[teacher\] without model and urls names what this run trains",
        ),
        ({"teacher": {"model": "wise", "protocol": "binary"}, **DISTILLING}, "protocol and api_key_file are of urls"),
        (
            {
                "teacher": {},
                "filters": [],
                "training": {"lora": {}, "value_head": {}, "loss": {"kind": "distillation"}},
            },
            "training.value_head estimates",
        ),
        ({"teacher": {"urls": ["wise"]}, **DISTILLING}, "'wise' is no server"),
        (
            {"teacher": {}, "filters": [{"kind": "zero_advantage"}], **DISTILLING},
            "zero_advantage removes .* training.loss.kind",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(
    make_config: Callable[..., RunConfig], fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        make_config(**fields)


def test_rollouts_without_an_advantage_are_kept(make_config: Callable[..., RunConfig]) -> None:
    assert make_config().filters
    config = make_config(teacher={}, **DISTILLING)
    assert config.filters == []
    assert RunConfig.model_validate_json(config.model_dump_json()) == config
    kept = make_config(teacher={}, filters=[{"kind": "repetition"}], **DISTILLING)
    assert [each.kind for each in kept.filters] == ["repetition"]


def test_a_column_is_that_of_the_turns_copy() -> None:
    """The branches hold the turns that the teacher fills, also as copies."""
    turn = make_turn([1], [2])
    copy = replace(turn, player="black")
    turn.columns[TEACHER_LOG_PROBABILITIES] = np.zeros(1, np.float32)
    assert copy.columns is turn.columns
