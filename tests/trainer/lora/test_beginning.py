"""A run that begins with a published adapter: over its own base model alone, and again after the adapter is gone."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from counterpoint.run.trainer_files import start_directory
from counterpoint.trainer.broadcast import Broadcaster
from counterpoint.transport.files.atomic import published_steps
from tests.trainer.one_process_trainer import Death, broadcast, life, write_member

pytestmark = pytest.mark.slow

PLAIN = {"rank": 2, "target_modules": ["q_proj"]}


def published(output_dir: Path, model: Path, **config: Any) -> Path:
    """The broadcast of a run that has trained an adapter of `PLAIN`."""
    write_member(output_dir, model, "winner", lora=PLAIN, learning_rate=1e-3)
    with life(output_dir, model, {"winner": 1}, **config) as one:
        one.until_step(winner=1)
    return output_dir / "run_winner" / "broadcast" / "step_1"


@pytest.mark.parametrize(("kind", "layers"), [("dense", ["q_proj", "down_proj"]), ("moe", ["q_proj"])])
def test_an_adapter_begins_a_run_over_its_own_base_alone(
    kind: str, layers: list[str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    own: Path = request.getfixturevalue(f"{kind}_directory")
    plain = {"rank": 2, "target_modules": layers}
    torch.manual_seed(99)
    other = tmp_path / "other"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(own)).save_pretrained(other)
    write_member(tmp_path / "first", own, "winner", lora=plain, learning_rate=1e-3)
    with life(tmp_path / "first", own, {"winner": 2}) as one:
        one.until_step(winner=2)
    adapter = tmp_path / "first" / "run_winner" / "broadcast" / "step_2"
    lora = {**plain, "start_from": str(adapter)}
    write_member(tmp_path / "same", own, "child", lora=lora)
    with life(tmp_path / "same", own, {"child": 1}) as one:
        one.until_step(child=1)
        begun, given = broadcast(tmp_path / "same", "child", 0), broadcast(tmp_path / "first", "winner", 2)
        assert all(torch.equal(begun[name], given[name]) for name in given)
    write_member(tmp_path / "another", other, "child", lora=lora)
    with life(tmp_path / "another", other, {"child": 1}) as one:
        one.turn_until(lambda: "child" in one.wire.evicted, "the refusal")
        assert "training.lora.start_from" in one.wire.evicted["child"]
        assert "another base model" in one.wire.evicted["child"]
        assert not (tmp_path / "another" / "run_child" / "broadcast").exists()
        assert (tmp_path / "another" / "run_child" / "control" / "config_validation_error.txt").exists()
    without = shutil.copytree(adapter, tmp_path / "without")
    (without / "probe.json").unlink()
    write_member(tmp_path / "another", other, "foreign", lora={**plain, "start_from": str(without)})
    with life(tmp_path / "another", other, {"foreign": 1}) as one:
        one.until_step(foreign=1)


def test_a_run_with_a_checkpoint_goes_on_over_its_own_base_alone(dense_directory: Path, tmp_path: Path) -> None:
    """A job's `model` may be another one at the resume: changed in its file, or built anew under the same name."""
    torch.manual_seed(99)
    other = tmp_path / "other"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(dense_directory)).save_pretrained(other)
    keys: dict[str, Any] = {"lora": PLAIN, "learning_rate": 1e-3, "checkpoint_interval": 1}
    write_member(tmp_path / "job", dense_directory, "winner", **keys)
    with life(tmp_path / "job", dense_directory, {"winner": 1}) as one:
        one.until_step(winner=1)
    write_member(tmp_path / "job", other, "winner", **keys)
    with life(tmp_path / "job", other, {"winner": 2}) as one:
        one.turn_until(lambda: "winner" in one.wire.evicted, "the refusal")
        assert "another base model" in one.wire.evicted["winner"]
    write_member(tmp_path / "job", dense_directory, "winner", **keys)
    with life(tmp_path / "job", dense_directory, {"winner": 2}) as one:
        one.until_step(winner=2)


def test_a_run_without_a_checkpoint_begins_again_after_its_adapters_directory_is_gone(
    dense_directory: Path, tmp_path: Path
) -> None:
    """Such as a broadcast of another run, which keeps its newest."""
    plain = {"rank": 2, "target_modules": ["q_proj"]}
    write_member(tmp_path / "first", dense_directory, "winner", lora=plain, learning_rate=1e-3)
    with life(tmp_path / "first", dense_directory, {"winner": 1}) as one:
        one.until_step(winner=1)
    given = tmp_path / "first" / "run_winner" / "broadcast" / "step_1"
    adapter = broadcast(tmp_path / "first", "winner", 1)
    lora = {**plain, "start_from": str(given)}
    write_member(tmp_path / "job", dense_directory, "child", lora=lora, checkpoint_interval=2)
    with life(tmp_path / "job", dense_directory, {"child": 1}) as one:
        one.until_step(child=1)
    shutil.rmtree(given)
    with life(tmp_path / "job", dense_directory, {"child": 4}, keep_checkpoints=1) as one:
        one.until_step(child=0)
        begun = broadcast(tmp_path / "job", "child", 0)
        assert all(torch.equal(begun[name], adapter[name]) for name in adapter)
        kept = start_directory(tmp_path / "job", "child")
        assert kept.exists()
        one.until_step(child=4)
        assert not kept.exists(), "its checkpoints are enough"
    elsewhere = {**plain, "start_from": str(tmp_path / "elsewhere")}
    write_member(tmp_path / "job", dense_directory, "other", lora=elsewhere)
    with life(tmp_path / "job", dense_directory, {"other": 1}) as one:
        one.turn_until(lambda: "other" in one.wire.evicted, "the refusal")
        assert "No such file" in one.wire.evicted["other"]


def test_a_probe_that_cannot_be_computed_evicts_its_run_alone(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = published(tmp_path / "first", dense_directory)

    def lacks_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    monkeypatch.setattr("counterpoint.trainer.shells.shared.ask_together", lacks_memory)
    monkeypatch.setattr("counterpoint.trainer.shells.entrance.ask", lacks_memory)
    write_member(tmp_path / "job", dense_directory, "child", lora={**PLAIN, "start_from": str(given)})
    write_member(tmp_path / "job", dense_directory, "other")
    with life(tmp_path / "job", dense_directory, {"child": 1, "other": 1}) as one:
        one.turn_until(lambda: "child" in one.wire.evicted, "the eviction")
        assert "Tried to allocate 1 GiB" in one.wire.evicted["child"]
        one.until_step(other=1)


def test_a_run_keeps_what_it_begins_with_before_its_version_0_is_published(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of version 0 may be committed from then on, and must be trained from these weights."""
    given = published(tmp_path / "first", dense_directory)
    adapter = broadcast(tmp_path / "first", "winner", 1)
    write_member(tmp_path / "job", dense_directory, "child", lora={**PLAIN, "start_from": str(given)})
    publish = Broadcaster.publish

    def publish_and_die(*arguments: Any) -> None:
        publish(*arguments)
        raise Death

    with monkeypatch.context() as patched, life(tmp_path / "job", dense_directory, {"child": 0}) as one:
        patched.setattr(Broadcaster, "publish", publish_and_die)
        with pytest.raises(Death):
            one.until_step(child=0)
    assert published_steps(tmp_path / "job" / "run_child" / "broadcast") == [0]
    shutil.rmtree(given)
    with life(tmp_path / "job", dense_directory, {"child": 1}) as one:
        one.until_step(child=1)
        begun = broadcast(tmp_path / "job", "child", 0)
        assert all(torch.equal(begun[name], adapter[name]) for name in adapter)


def test_a_directory_that_may_not_be_read_costs_no_other_run(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = published(tmp_path / "first", dense_directory)
    write_member(tmp_path / "job", dense_directory, "child", lora={**PLAIN, "start_from": str(given)})
    with life(tmp_path / "job", dense_directory, {"child": 0}) as one:
        one.until_step(child=0)
    write_member(tmp_path / "job", dense_directory, "late", lora={**PLAIN, "start_from": str(given)})
    for name in ("stat", "open"):
        monkeypatch.setattr(os, name, denied(getattr(os, name), given))
    with life(tmp_path / "job", dense_directory, {"child": 1, "late": 1}) as one:
        one.until_step(child=1)
        one.turn_until(lambda: "late" in one.wire.evicted, "the refusal")
        assert "Permission denied" in one.wire.evicted["late"]


def denied(real: Callable[..., Any], directory: Path) -> Callable[..., Any]:
    """A function of `os` for a user who may not look into `directory`."""

    def function(path: Any, *arguments: Any, **more: Any) -> Any:
        if isinstance(path, str | os.PathLike) and directory in Path(path).parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *arguments, **more)

    return function
