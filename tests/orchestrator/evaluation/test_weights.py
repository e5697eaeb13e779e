"""Weights that are held although their broadcast is removed, and the best ones, kept whole."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pytest
from safetensors.numpy import load_file, save_file

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.inference import delta
from counterpoint.inference.checkpoint import BASE, DELTA, is_delta
from counterpoint.inference.loads import Stated
from counterpoint.orchestrator.evaluation import weights
from counterpoint.orchestrator.evaluation.alone import Subject, _of_subject
from counterpoint.orchestrator.evaluation.estimates import proportion
from counterpoint.orchestrator.evaluation.result import EvaluationResult
from counterpoint.run.evaluations import EvaluationConfig
from counterpoint.transport.files.atomic import STABLE, publish_directory, published_steps, remove_directory


def broadcast(run_dir: Path, step: int) -> Path:
    directory = run_dir / "broadcast" / f"step_{step}"
    with publish_directory(directory) as partial:
        (partial / "adapter_model.safetensors").write_bytes(b"weights %d" % step)
        (partial / "sub").mkdir()
        (partial / "sub" / "more").write_bytes(b"more")
    return directory


def result(step: int, score: float, failed: int = 0, metric: str = "pass@1") -> EvaluationResult:
    config = EvaluationConfig(
        name="e",
        environments=[EnvironmentConfig(name="w", kind="reverse-text")],
        keep_best=metric,
    )
    line = {"rollouts/completed": 100 - failed, "policy_version/min": step, "policy_version/max": step}
    return EvaluationResult(config, step, {metric: proportion([score])}, failed, line)


def held(run_dir: Path, step: int) -> Path:
    broadcast(run_dir, step)
    return weights.hold(run_dir, "e", step)


def test_held_weights_outlive_their_broadcast_and_cost_no_space(tmp_path: Path) -> None:
    source = broadcast(tmp_path, 3)
    kept = weights.hold(tmp_path, "e", 3)
    assert (kept / "adapter_model.safetensors").samefile(source / "adapter_model.safetensors")
    remove_directory(source)
    assert (kept / "adapter_model.safetensors").read_bytes() == b"weights 3"
    assert (kept / "sub" / "more").read_bytes() == b"more"
    assert weights.hold(tmp_path, "e", 3) == kept, "held already"
    assert weights.held_steps(tmp_path, "e") == [3]
    weights.release(tmp_path, "e", 3)
    assert weights.held_steps(tmp_path, "e") == []


def test_a_broadcast_that_is_being_removed_is_not_held(tmp_path: Path) -> None:
    source = broadcast(tmp_path, 3)
    (source / STABLE).unlink()
    with pytest.raises(FileNotFoundError):
        weights.hold(tmp_path, "e", 3)
    assert weights.held_steps(tmp_path, "e") == []


def test_another_disk_gets_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    source = broadcast(tmp_path, 3)
    monkeypatch.setattr("counterpoint.orchestrator.evaluation.weights.os.link", refuse)
    kept = weights.hold(tmp_path, "e", 3)
    assert not (kept / "adapter_model.safetensors").samefile(source / "adapter_model.safetensors")
    assert (kept / "adapter_model.safetensors").read_bytes() == b"weights 3"


def test_weights_in_shared_memory_are_copied(tmp_path: Path) -> None:
    """They go with the trainer."""
    memory = tmp_path / "memory"
    memory.mkdir()
    file = broadcast(tmp_path, 3) / "adapter_model.safetensors"
    (memory / "weights").write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(memory / "weights")
    kept = weights.hold(tmp_path, "e", 3) / "adapter_model.safetensors"
    shutil.rmtree(memory)
    assert not kept.is_symlink()
    assert kept.read_bytes() == b"weights 3"
    with pytest.raises(FileNotFoundError):
        weights.hold(tmp_path, "another", 3)
    assert weights.held_steps(tmp_path, "another") == []


def test_the_best_is_kept_alone(tmp_path: Path) -> None:
    kept = [
        weights.keep_if_best(tmp_path, result(step, score), held(tmp_path, step))
        for step, score in enumerate((0.3, 0.2, 0.5, 0.5))
    ]
    assert kept == [True, False, True, False]
    assert published_steps(tmp_path / "best") == [2]
    content = orjson.loads((tmp_path / "best/step_2/best.json").read_bytes())
    assert (content["step"], content["score"], content["metric"], content["evaluation"]) == (2, 0.5, "pass@1", "e")
    shutil.rmtree(tmp_path / "broadcast")
    weights.release(tmp_path, "e", 2)
    assert (tmp_path / "best/step_2/adapter_model.safetensors").read_bytes() == b"weights 2"


def test_a_result_with_many_failures_is_never_the_best(tmp_path: Path) -> None:
    assert not weights.keep_if_best(tmp_path, result(0, 1.0, failed=11), held(tmp_path, 0))
    assert weights.keep_if_best(tmp_path, result(1, 0.1, failed=10), held(tmp_path, 1))


def test_another_metric_begins_anew_and_what_cannot_be_read_is_replaced(tmp_path: Path) -> None:
    assert weights.keep_if_best(tmp_path, result(0, 0.9), held(tmp_path, 0))
    assert weights.keep_if_best(tmp_path, result(1, 0.1, metric="reward/mean"), held(tmp_path, 1))
    (tmp_path / "best/step_1/best.json").write_bytes(b"{")
    assert weights.keep_if_best(tmp_path, result(2, 0.0, metric="reward/mean"), held(tmp_path, 2))
    assert published_steps(tmp_path / "best") == [2]


def test_the_best_weights_are_whole_where_what_changed_was_broadcast(tmp_path: Path) -> None:
    whole = np.arange(9, dtype=np.float32)
    with publish_directory(tmp_path / "run" / "broadcast" / "step_3") as partial:
        (partial / BASE).mkdir()
        save_file({"w": whole}, partial / BASE / "model.safetensors")
        base = delta.open_bits(partial / BASE / "model.safetensors")
        assert delta.write_delta(partial / DELTA, base, [("w", (whole * 2).view(np.uint32))], 1000)
    kept = weights.hold(tmp_path / "run", "e", 3)
    assert weights.keep_if_best(tmp_path / "run", result(3, 0.5), kept)
    best = tmp_path / "run" / "best" / "step_3"
    assert {path.name for path in best.iterdir()} == {"model.safetensors", "best.json", STABLE}
    assert (load_file(best / "model.safetensors")["w"] == whole * 2).all()
    assert is_delta(kept), "the held weights are links of the broadcast, which never changes"
    assert (load_file(kept / BASE / "model.safetensors")["w"] == whole).all()


@pytest.mark.parametrize(
    ("before", "after", "versions"),
    [
        ({"a": 3}, {"a": 3}, (3, 3, 3)),
        ({"a": 3, "b": 3}, {"a": 5, "b": 4}, (None, 3, 5)),
        ({"a": None}, {"a": 3}, (None, None, None)),
        ({}, {"a": 3}, (None, None, None)),
        ({"a": 3, "b": 3}, {"a": 3}, (None, None, None)),
        ({}, {}, (None, None, None)),
    ],
)
def test_versions_of_others_servers_are_those_that_all_said_before_and_afterwards(
    before: dict[str, int | None], after: dict[str, int | None], versions: tuple[int | None, ...]
) -> None:
    said = [{url: Stated(1, version) for url, version in held.items()} for held in (before, after)]
    line = _of_subject(EvaluationResult(cast(Any, None), 0, {}, 0, {}), Subject("m", {}, follows=True), said).line
    assert (line["step"], line["policy_version/min"], line["policy_version/max"]) == versions
