"""Checkpoints: a resume finds what the last commit held, and refuses what does not fit it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.orchestrator.run_directory import ConfigurationError
from counterpoint.orchestrator.step.checkpoint import (
    FORMAT,
    StepCheckpoint,
    check_resumable,
    committed_lines,
    identity_of,
    load_newest,
    write_checkpoint,
)
from counterpoint.run.config import RunConfig
from counterpoint.run.trained import LoraConfig
from counterpoint.transport.errors import CheckpointError
from counterpoint.transport.files.atomic import publish_directory, published_steps
from counterpoint.transport.files.json_lines import append_line
from tests.support.rollouts import make_rollout


def make_config(tmp_path: Path, **fields: Any) -> RunConfig:
    values: dict[str, Any] = {
        "output_dir": tmp_path,
        "model": "unused",
        "environments": [EnvironmentConfig(name="toy", kind="reverse-text")],
    }
    return RunConfig(**(values | fields))


def make_checkpoint(config: RunConfig, step: int, **fields: Any) -> StepCheckpoint:
    values: dict[str, Any] = {
        "step": step,
        "identity": identity_of(config),
        "scheduler": {"next_step": step + 1, "groups": []},
        "counts": {"rollouts/cancelled": 3},
        "waiting": [make_rollout(step)],
        "line": {"step": step, "reward/mean": 0.5},
    }
    return StepCheckpoint(**(values | fields))


def test_the_newest_is_found_and_old_ones_go(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    for step in (1, 2, 3):
        write_checkpoint(config.run_dir, make_checkpoint(config, step), keep=2)
    assert published_steps(config.run_dir / "checkpoints") == [2, 3]
    loaded = load_newest(config)
    assert loaded is not None
    assert (loaded.step, loaded.scheduler["next_step"], loaded.waiting[0].rollout_id) == (3, 4, "3-0")
    assert committed_lines(config.run_dir) == [{"step": step, "reward/mean": 0.5} for step in (2, 3)]


def test_lines_of_older_checkpoints_that_are_kept_do_not_count(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    for step in range(1, 11):
        write_checkpoint(config.run_dir, make_checkpoint(config, step), keep=2, every=4)
    assert published_steps(config.run_dir / "checkpoints") == [4, 8, 9, 10]
    assert [line["step"] for line in committed_lines(config.run_dir)] == [8, 9, 10]
    write_checkpoint(config.run_dir, make_checkpoint(config, 11), keep=2, every=4)
    assert [line["step"] for line in committed_lines(config.run_dir)] == [10, 11], "step 9 was removed"


def test_a_checkpoint_of_another_version_is_called_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path)
    with monkeypatch.context() as former:
        former.setattr("counterpoint.orchestrator.step.checkpoint.FORMAT", 1)
        write_checkpoint(config.run_dir, make_checkpoint(config, 1), keep=2)
    assert load_newest(config) is not None
    with monkeypatch.context() as newer:
        newer.setattr("counterpoint.orchestrator.step.checkpoint.FORMAT", FORMAT + 1)
        write_checkpoint(config.run_dir, make_checkpoint(config, 2), keep=2)
    for read in (load_newest, check_resumable):
        with pytest.raises(CheckpointError, match=r"cannot be read.*\bnewer\b"):
            read(config)


def test_no_checkpoint(tmp_path: Path) -> None:
    assert load_newest(make_config(tmp_path)) is None


@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize("witness", ["metrics.jsonl", "rollouts"])
def test_records_of_steps_whose_checkpoints_were_lost_are_no_leftovers(tmp_path: Path, kept: int, witness: str) -> None:
    config = make_config(tmp_path)
    if kept:
        write_checkpoint(config.run_dir, make_checkpoint(config, kept), keep=2)
    for step in range(1, kept + 2):  # the last one was published, and not committed
        with publish_directory(config.run_dir / "rollouts" / f"step_{step}"):
            pass
        if step <= kept:
            append_line(config.run_dir / "metrics.jsonl", {"step": step}, durable=False)
    loaded = load_newest(config)
    assert (loaded.step if loaded else 0) == kept, "a kill leaves as much"
    if witness == "rollouts":
        with publish_directory(config.run_dir / "rollouts" / f"step_{kept + 2}"):
            pass
    else:
        append_line(config.run_dir / "metrics.jsonl", {"step": kept + 1}, durable=False)
    with pytest.raises(ConfigurationError, match=f"step {kept + 1} .*checkpoints"):
        load_newest(config)


def test_a_shutdown_renews_the_state_and_keeps_the_metrics(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    write_checkpoint(config.run_dir, make_checkpoint(config, 1), keep=2)
    for waiting in ([make_rollout(7), make_rollout(8)], [make_rollout(9)]):
        write_checkpoint(config.run_dir, make_checkpoint(config, 1, waiting=waiting, line=None), keep=2)
        loaded = load_newest(config)
        assert loaded is not None
        assert [rollout.rollout_id for rollout in loaded.waiting] == [rollout.rollout_id for rollout in waiting]
    assert committed_lines(config.run_dir) == [{"step": 1, "reward/mean": 0.5}]
    assert len(list((config.run_dir / "checkpoints" / "step_1").glob("waiting-*"))) == 1


@pytest.mark.parametrize(
    "changed",
    [{"seed": 1}, {"environments": [EnvironmentConfig(name="toy", kind="reverse-text", args={"seed": 1})]}],
)
def test_what_decides_the_order_of_examples_must_not_change(tmp_path: Path, changed: dict[str, Any]) -> None:
    config = make_config(tmp_path)
    write_checkpoint(config.run_dir, make_checkpoint(config, 1), keep=2)
    with pytest.raises(ConfigurationError, match=next(iter(changed))):
        load_newest(make_config(tmp_path, **changed))


def test_long_integers_of_arguments_are_kept(tmp_path: Path) -> None:
    def config(answer: int) -> RunConfig:
        data = {"rows": [{"question": "?", "answer": answer}]}
        environment = EnvironmentConfig(name="toy", kind="single-turn", args={"data": data})
        return make_config(tmp_path, environments=[environment])

    write_checkpoint(config(2**70).run_dir, make_checkpoint(config(2**70), 1), keep=2)
    assert load_newest(config(2**70)) is not None
    with pytest.raises(ConfigurationError, match="environments"):
        load_newest(config(2**70 + 1))


ADAPTER = LoraConfig(rank=4, target_modules=["q_proj", "v_proj"])


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (None, ADAPTER, r"training.lora = {'rank': 4.* differs from nothing \(all weights are trained\)"),
        (ADAPTER, None, r"training.lora = nothing \(all weights are trained\) differs from {'rank': 4"),
        (ADAPTER, ADAPTER.model_copy(update={"rank": 8}), "its checkpoints hold other weights.*Restore training.lora"),
    ],
)
def test_which_weights_are_trained_must_not_change(
    tmp_path: Path, before: LoraConfig | None, now: LoraConfig | None, said: str
) -> None:
    config = make_config(tmp_path, training={"lora": before})
    write_checkpoint(config.run_dir, make_checkpoint(config, 1), keep=2)
    with pytest.raises(ConfigurationError, match=said):
        check_resumable(make_config(tmp_path, training={"lora": now}))


def test_an_adapters_scale_may_change_and_an_older_checkpoint_names_no_weights(tmp_path: Path) -> None:
    config = make_config(tmp_path, training={"lora": ADAPTER})
    write_checkpoint(config.run_dir, make_checkpoint(config, 1), keep=2)
    other = ADAPTER.model_copy(update={"alpha": 3.0, "target_modules": ["v_proj", "q_proj"]})
    assert load_newest(make_config(tmp_path, training={"lora": other})) is not None
    identity = {key: value for key, value in identity_of(config).items() if key != "training.lora"}
    write_checkpoint(config.run_dir, make_checkpoint(config, 2, identity=identity), keep=2)
    assert load_newest(make_config(tmp_path)) is not None


def test_what_does_not_may(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    write_checkpoint(config.run_dir, make_checkpoint(config, 1), keep=2)
    environments = [EnvironmentConfig(name="toy", kind="reverse-text", rollout_timeout_seconds=5)]
    assert load_newest(make_config(tmp_path, environments=environments, steps=7)) is not None


def test_where_a_token_lies_may_change(tmp_path: Path) -> None:
    def at(directory: str) -> list[EnvironmentConfig]:
        judge = {"kind": "judge", "api_key_file": f"{directory}/token"}
        return [EnvironmentConfig(name="toy", kind="reverse-text", args={"rubric": {"parts": [judge]}})]

    config = make_config(tmp_path, environments=at("/etc/counterpoint"))
    write_checkpoint(config.run_dir, make_checkpoint(config, 1), keep=2)
    assert load_newest(make_config(tmp_path, environments=at("/run/secrets"))) is not None


@pytest.mark.parametrize("name", ["orchestrator.msgpack", "waiting-0.bin"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, name: str) -> None:
    config = make_config(tmp_path)
    write_checkpoint(config.run_dir, make_checkpoint(config, 1), keep=2)
    path = config.run_dir / "checkpoints" / "step_1" / name
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match="step_1"):
        load_newest(config)


def test_metrics_are_plain_json(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    write_checkpoint(config.run_dir, make_checkpoint(config, 1), keep=2)
    assert orjson.loads((config.run_dir / "checkpoints/step_1/metrics.json").read_bytes())["step"] == 1
