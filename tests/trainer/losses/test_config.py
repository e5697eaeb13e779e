"""A kind of loss as a preset: what it sets, in the loss and around it, what overrides it, and what is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import to_toml
from counterpoint.run.config import RunConfig
from counterpoint.run.loss import KINDS, LossConfig, defaults_of
from counterpoint.run.trained import LARGEST_STEP


def make_run(tmp_path: Path, loss: dict[str, Any], **tables: Any) -> RunConfig:
    environments = [
        {"name": "short", "kind": "reverse-text", "sampling": {"max_tokens": 50}},
        {"name": "long", "kind": "reverse-text", "sampling": {"max_tokens": 100}},
    ]
    given = {"output_dir": tmp_path, "model": "model", "environments": environments, "training": {"loss": loss}}
    return RunConfig.model_validate(given | tables)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_sets_the_keys_of_its_family_and_no_others(kind: str) -> None:
    config = LossConfig(kind=kind)
    given = {name: value for name, value in config.model_dump().items() if value is not None}
    expected = {name: value for name, value in defaults_of(kind).items() if value is not None}
    assert given == {"kind": kind, "args": {}} | expected
    assert LossConfig.model_validate(config.model_dump()) == config
    assert LossConfig.model_validate(given) == config


def test_every_constant_can_be_set() -> None:
    config = LossConfig(kind="dapo", clip_high=0.5, normalisation="sequence")
    assert (config.clip_low, config.clip_high, config.normalisation) == (0.2, 0.5, "sequence")
    corrected = LossConfig(kind="grpo", ratio_to="old", correction="mask")
    assert (corrected.correction_low, corrected.correction_high) == (None, 3.0)
    assert LossConfig(kind="reinforce", correction="truncate", correction_low=0.5).correction_high is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kind": "dappo"}, r"training\.loss\.kind = 'dappo': expected one of .*nearest: dapo"),
        ({"clip_high": 0.3}, r"clip_high has no meaning for kind = 'importance_ratio'.* a key of grpo, dr_grpo, dapo"),
        ({"kind": "grpo", "ratio_clip": 2.0}, "ratio_clip has no meaning for kind = 'grpo'"),
        ({"kind": "my.module:loss", "kl_coefficient": 0.1}, "kl_coefficient has no meaning"),
        ({"kind": "grpo", "args": {"scale": 1}}, "is for a loss of your own, not for kind = 'grpo'"),
        ({"kind": "grpo", "correction": "truncate"}, 'the ratio is to the inference engine already.*set ratio_to = "old"'),
        ({"kind": "grpo", "correction_high": 2.0}, 'take correction = "truncate" or "mask"'),
        ({"kind": "cispo", "ratio_low": 2.0, "ratio_high": 1.0}, "ratio_low = 2.0 is not below ratio_high = 1.0"),
        ({"kind": "grpo", "clip_dual": 1.1}, "clip_dual = 1.1 is not above 1 \\+ clip_high = 1.2"),
        ({"kind": "grpo", "kl_coefficient": 0.1, "kl_estimator": "k1"}, 'the gradient of log p has the expectation 0'),
        ({"kind": "grpo", "kl_weighted": True}, "takes a kl_coefficient above 0"),
        ({"kind": "grpo", "entropy_coefficient": float("nan")}, "entropy_coefficient\n  Input should be a finite number"),
        ({"kind": "grpo", "normalisation_length": 3}, 'takes normalisation = "sample"; it is "sequence"'),
    ],
)  # fmt: skip
def test_what_computes_nonsense_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        LossConfig.model_validate(given)


def test_a_loss_sets_what_belongs_to_it_around_it(tmp_path: Path) -> None:
    assert make_run(tmp_path, {}).advantage.kind == "group_mean"
    assert make_run(tmp_path, {"kind": "rloo"}).advantage.kind == "leave_one_out"
    own = make_run(tmp_path, {"kind": "rloo"}, advantage={"kind": "group_mean", "length_penalty": 0.1})
    assert own.advantage.kind == "group_mean"
    dapo = make_run(tmp_path, {"kind": "dapo"}, advantage={"length_penalty": 0.1}).advantage
    assert dapo.overlong is not None
    assert (dapo.kind, dapo.overlong.longest, dapo.overlong.buffer) == ("standardised", 100, 20)
    brief = make_run(tmp_path, {}, advantage={"overlong": {"longest": 4, "penalty": 0.5}}).advantage.overlong
    assert brief is not None
    assert (brief.longest, brief.buffer, brief.penalty) == (4, 1, 0.5)
    assert make_run(tmp_path, {"kind": "dr_grpo"}).training.loss.normalisation_length == 100
    with pytest.raises(ValidationError, match=r"kl_coefficient = 0.1 .*\[training.reference\]"):
        make_run(tmp_path, {"kind": "grpo", "kl_coefficient": 0.1})
    plus_plus = make_run(tmp_path, {"kind": "reinforce_plus_plus"})
    assert (plus_plus.advantage.kind, plus_plus.filters) == ("batch_standardised", [])
    with pytest.raises(ValidationError, match=r"zero_advantage removes .* computes them when the step is assembled"):
        make_run(tmp_path, {"kind": "reinforce_plus_plus"}, filters=[{"kind": "zero_advantage"}])


@pytest.mark.parametrize(
    "training",
    [
        {"loss": {"kind": "grpo", "kl_coefficient": 0.1}, "reference": {}},
        {"loss": {"kind": "grpo", "entropy_coefficient": 0.1}},
        {"reference": {"reward_coefficient": 0.1}},
    ],
)
def test_a_penalty_reaches_groups_of_equal_rewards_unless_the_file_filters_them(
    tmp_path: Path, training: dict[str, Any]
) -> None:
    assert make_run(tmp_path, {}, training=training).filters == []
    (own,) = make_run(tmp_path, {}, training=training, filters=[{"kind": "zero_advantage"}]).filters
    (usual,) = make_run(tmp_path, {}, training={"reference": {}}).filters
    assert own == usual


def test_a_penalty_that_the_loss_would_not_get_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"overlong\.buffer = 101 is more than longest = 100"):
        make_run(tmp_path, {}, advantage={"overlong": {"buffer": 101}})
    ppo: dict[str, Any] = {"loss": {"kind": "ppo"}, "value_head": {}}
    dapo = make_run(tmp_path, {}, filters=[], training={"loss": {"kind": "dapo"}, "value_head": {}})
    assert dapo.advantage.overlong is None
    both: list[dict[str, Any]] = [{"length_penalty": 0.1}, {"overlong": {}}]
    for penalties in both:
        with pytest.raises(ValidationError, match=r"with training\.value_head the trainer computes others"):
            make_run(tmp_path, {}, filters=[], training=ppo, advantage=penalties)
    make_run(tmp_path, {}, filters=[], training=ppo, advantage={"overlong": {"penalty": 0.0}})
    with pytest.raises(
        ValidationError, match=r"advantage\.discount = 0\.9 is between turns, .* training\.value_head\.discount"
    ):
        make_run(tmp_path, {}, filters=[], training=ppo, advantage={"discount": 0.9})
    with pytest.raises(
        ValidationError, match=r"advantage\.discount = 0\.9 has no meaning for advantage\.kind = 'group_mean'"
    ):
        make_run(tmp_path, {}, advantage={"discount": 0.9})
    for own_kind in ("turn_returns", "anchor_states", "my:own"):
        make_run(tmp_path, {}, advantage={"discount": 0.9, "kind": own_kind})
    teacher = {"urls": ["http://127.0.0.1:8000"]}
    penalised: dict[str, Any] = {"reference": {"reward_coefficient": 0.1}, "loss": {"kind": "distillation"}}
    with pytest.raises(ValidationError, match="weighs with its own reward_coefficient, and that is 0"):
        make_run(tmp_path, {}, teacher=teacher, training=penalised)
    mixed = penalised | {"loss": {"kind": "distillation", "reward_coefficient": 1.0}}
    make_run(tmp_path, {}, teacher=teacher, training=mixed)


@pytest.mark.parametrize("loss", ["rloo", "gspo"])
def test_a_loss_that_mixes_the_tokens_of_a_sample_takes_no_advantages_of_turns(tmp_path: Path, loss: str) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"advantage": {"kind": "turn_returns"}}),
        ({"value_head": {}}, {"filters": []}),
    ]
    for head, given in cases:
        training = {"loss": {"kind": loss}} | head
        with pytest.raises(
            ValidationError, match=rf"training\.loss\.kind = '{loss}' with ratio_level = .* weighs each token by all"
        ):
            make_run(tmp_path, {}, training=training, **given)
        for level in ("token", "sequence_mean_token"):  # with each token's own gradient
            by_token = training | {"loss": {"kind": loss, "ratio_level": level}}
            make_run(tmp_path, {}, training=by_token, **given)
    by_weight = {"loss": {"kind": "cispo", "ratio_level": "sequence"}}
    assert not make_run(tmp_path, {}, training=by_weight, advantage={"kind": "turn_returns"}).training.loss.mixes_tokens


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("distillation", "sft")])
def test_the_resolved_configuration_means_the_same(tmp_path: Path, kind: str) -> None:
    """As it is written to `control/orch.toml` and read by the trainer."""
    config = make_run(tmp_path, {"kind": kind})
    assert RunConfig.model_validate(tomllib.loads(to_toml(config))) == config


def test_runs_of_a_job_inherit_what_was_set_and_not_what_belongs_to_a_kind(tmp_path: Path) -> None:
    orchestrator = {
        "environments": [{"name": "short", "kind": "reverse-text"}],
        "training": {"loss": {"kind": "dapo"}, "lora": {}},
    }
    runs = [{"run_id": "a"}, {"run_id": "b", "training": {"loss": {"kind": "cispo"}}}]
    job = {
        "model": "model",
        "output_dir": tmp_path,
        "orchestrator": orchestrator,
        "runs": runs,
        "trainer": {"max_runs": 2},
    }
    first, second = JobConfig.model_validate(job).every_run
    assert (first.training.loss.clip_high, first.advantage.overlong is None) == (0.28, False)
    assert (second.training.loss.ratio_clip, second.advantage.overlong) == (5.0, None)


def test_a_run_beside_one_that_distils_keeps_the_default_filters(tmp_path: Path) -> None:
    orchestrator = {
        "environments": [{"name": "short", "kind": "reverse-text"}],
        "teacher": {"urls": ["http://127.0.0.1:8000"]},
        "training": {"loss": {"kind": "distillation"}, "lora": {}},
    }
    runs = [{"run_id": "a"}, {"run_id": "b", "training": {"loss": {"kind": "module:function"}}}]
    trainer = {"max_runs": 2}
    job = {"model": "m", "output_dir": tmp_path, "orchestrator": orchestrator, "runs": runs, "trainer": trainer}
    first, second = JobConfig.model_validate(job).every_run
    assert (first.filters, [each.kind for each in second.filters]) == ([], ["zero_advantage"])


def test_no_run_has_more_steps_than_its_files_can_hold(tmp_path: Path) -> None:
    assert make_run(tmp_path, {}, steps=LARGEST_STEP).steps == LARGEST_STEP
    with pytest.raises(ValidationError, match="less than or equal to"):
        make_run(tmp_path, {}, steps=LARGEST_STEP + 1)
