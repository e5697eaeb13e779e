"""Checkpoints and broadcasts as files: exact, whole, and only as many as asked for."""

from __future__ import annotations

import json
import os
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from counterpoint.run.trainer_files import checkpoints_directory
from counterpoint.trainer.broadcast import Broadcaster
from counterpoint.trainer.metrics import MetricsFile
from counterpoint.trainer.probe import BrokenWeights
from counterpoint.trainer.runs import checkpoint
from counterpoint.trainer.runs.checkpoints import Checkpoints
from counterpoint.transport.errors import CheckpointError
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.telemetry.spans import SpanLog
from tests.support.silly_rename import is_held, keep_removed_files
from tests.trainer.conftest import make_batch
from tests.trainer.lone_run import make_lone_run


def test_a_resumed_run_removes_the_checkpoint_from_which_it_goes_on_also_on_nfs(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_lone_run(tmp_path, dense_directory)
    first.train(make_batch(1))
    checkpoint.write(checkpoint.take(first.run), tmp_path, keep=1)
    state = checkpoints_directory(tmp_path, "default") / "step_1" / "state.safetensors"
    keep_removed_files(monkeypatch)
    second = make_lone_run(tmp_path, dense_directory, resume=True)
    assert is_held(state.stat().st_ino)
    second.train(make_batch(2))
    checkpoint.write(checkpoint.take(second.run), tmp_path, keep=1)
    assert published_steps(state.parents[1]) == [2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "training"),
    [
        ({}, {"lr_schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.1}),
        ({"dtype": "bfloat16"}, {}),
        ({"dtype": "bfloat16"}, {"lora": {"rank": 2}}),
    ],
)
def test_training_goes_on_bit_for_bit(
    moe_directory: Path, tmp_path: Path, trainer: dict[str, Any], training: dict[str, Any]
) -> None:
    first = make_lone_run(tmp_path, moe_directory, trainer, **training)
    for step in (1, 2):
        first.train(make_batch(step, routed=True))
    torch.rand(7)  # so that the generators are not as any process begins with them
    checkpoint.write(checkpoint.take(first.run), tmp_path, keep=2)
    random_after = torch.rand(3)
    second = make_lone_run(tmp_path, moe_directory, trainer, resume=True, **training)
    assert torch.equal(torch.rand(3), random_after)
    assert second.run.progress == first.run.progress
    assert second.run.progress.total_samples == 8
    for step in (3, 4):
        expected, found = (lone.train(make_batch(step, routed=True)) for lone in (first, second))
        assert found["loss"] == expected["loss"]
        assert found["learning_rate"] == expected["learning_rate"]
    former, latter = first.weights(), second.weights()
    assert all(torch.equal(former[name], latter[name]) for name in former)
    start = make_lone_run(tmp_path / "again", moe_directory, trainer, **training).weights()
    assert any(not torch.equal(former[name], start[name]) for name in former)


def test_a_broadcast_waits_for_the_disk_only_where_a_checkpoint_goes_back_to_it(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone = make_lone_run(tmp_path, dense_directory)
    broadcaster = Broadcaster(lone.learner.manager, tmp_path, "default", str(dense_directory), keep=9)
    synced: list[str] = []
    fsync = os.fsync

    def noticed(descriptor: int) -> None:
        fsync(descriptor)
        synced.append(str(Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path)))

    monkeypatch.setattr(os, "fsync", noticed)
    broadcaster.publish(lone.model, lone.run)
    assert any("broadcast" in name for name in synced), "the version that a life begins with"
    for step in (1, 2):
        lone.train(make_batch(step))
        synced.clear()
        broadcaster.publish(lone.model, lone.run)
        assert synced == []
    with closing(
        Checkpoints(tmp_path, 2, nullcontext, str, SpanLog(tmp_path / "spans.jsonl", "trainer"))
    ) as checkpoints:
        checkpoints.begin(lone.run)
        checkpoints.complete()
    weights = "run_default/broadcast/step_2/model.safetensors"
    state = next(name for name in synced if name.endswith("state.safetensors"))
    assert synced.index(weights) < synced.index(state), "no checkpoint goes back to weights that may be lost"
    assert not any("step_1" in name for name in synced)
    assert "trainer/default/trained.jsonl" in synced, (
        "the next admission repeats the checkpoint's line, which verify looks for"
    )


def test_only_the_newest_are_kept(dense_directory: Path, tmp_path: Path) -> None:
    lone = make_lone_run(tmp_path, dense_directory)
    broadcaster = Broadcaster(lone.learner.manager, tmp_path, "default", str(dense_directory), keep=2)
    for step in (1, 2, 3):
        lone.train(make_batch(step))
        checkpoint.write(checkpoint.take(lone.run), tmp_path, keep=2)
        broadcaster.publish(lone.model, lone.run)
    assert published_steps(checkpoints_directory(tmp_path, "default")) == [2, 3]
    assert published_steps(broadcaster.directory) == [2, 3]
    broadcaster.remove_beyond(2)
    assert published_steps(broadcaster.directory) == [2]


def test_a_checkpoint_of_another_model_is_refused(dense_directory: Path, moe_directory: Path, tmp_path: Path) -> None:
    lone = make_lone_run(tmp_path, dense_directory)
    lone.train(make_batch(1))
    checkpoint.write(checkpoint.take(lone.run), tmp_path, keep=1)
    other = make_lone_run(tmp_path, moe_directory)
    with pytest.raises(CheckpointError, match=r"step_1 cannot be used: weight .* is missing"):
        checkpoint.load(other.run, tmp_path, 1, random_state=False)
    state = checkpoints_directory(tmp_path, "default") / "step_1" / "state.json"
    description = json.loads(state.read_text())
    state.write_text(json.dumps(description | {"format": 99}))
    with pytest.raises(CheckpointError, match=r"newer version .* format 99") as raised:
        checkpoint.load(lone.run, tmp_path, 1, random_state=False)
    assert "remove" not in str(raised.value)


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ({"run_id": "another"}, ["'another'", "'default'"]),
        ({"progress": {"step": 2}}, ["step 2", "expected 1"]),
        ({"progress": {"unknown": 1}}, ["unknown"]),
    ],
)
def test_a_checkpoint_that_says_it_is_another_is_refused(
    dense_directory: Path, tmp_path: Path, said: dict[str, Any], names: list[str]
) -> None:
    """As one that was copied there by hand: it would be trained on as this run's."""
    lone = make_lone_run(tmp_path, dense_directory)
    lone.train(make_batch(1))
    checkpoint.write(checkpoint.take(lone.run), tmp_path, keep=1)
    state = checkpoints_directory(tmp_path, "default") / "step_1" / "state.json"
    description = json.loads(state.read_text())
    said = {key: description[key] | value if isinstance(value, dict) else value for key, value in said.items()}
    state.write_text(json.dumps(description | said))
    before, weights = lone.run.progress, lone.weights()
    with pytest.raises(CheckpointError, match=r"step_1 cannot be used") as raised:
        checkpoint.load(lone.run, tmp_path, 1, random_state=False)
    assert all(name in str(raised.value) for name in names)
    assert lone.run.progress == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in lone.weights().items())


@pytest.mark.slow
@pytest.mark.parametrize("max_runs", [1, 2])
def test_generators_that_runs_share_are_no_runs_own(dense_directory: Path, tmp_path: Path, max_runs: int) -> None:
    first = make_lone_run(tmp_path, dense_directory, {"max_runs": max_runs}, lora={"rank": 2})
    first.train(make_batch(1))
    torch.rand(7)  # so that they are not as any process begins with them
    checkpoint.write(checkpoint.take(first.run), tmp_path, keep=1)
    saved = torch.rand(3)
    torch.manual_seed(123)
    make_lone_run(tmp_path, dense_directory, {"max_runs": max_runs}, resume=True, lora={"rank": 2})
    assert torch.equal(torch.rand(3), saved) is (max_runs == 1)


def test_a_checkpoint_of_an_adapter_of_another_alpha_is_refused(dense_directory: Path, tmp_path: Path) -> None:
    lone = make_lone_run(tmp_path, dense_directory, lora={"rank": 2, "alpha": 16})
    lone.train(make_batch(1))
    checkpoint.write(checkpoint.take(lone.run), tmp_path, keep=1)
    other = make_lone_run(tmp_path, dense_directory, lora={"rank": 2, "alpha": 8})
    with pytest.raises(CheckpointError, match=r"alpha = 16, and run default has 8; put it back"):
        checkpoint.load(other.run, tmp_path, 1, random_state=False)
    checkpoint.load(lone.run, tmp_path, 1, random_state=False)


def test_broken_weights_are_not_published(dense_directory: Path, tmp_path: Path) -> None:
    lone = make_lone_run(tmp_path, dense_directory)
    with torch.no_grad():
        next(lone.model.parameters()).fill_(torch.nan)
    broadcaster = Broadcaster(lone.learner.manager, tmp_path, "default", str(dense_directory), keep=2)
    with pytest.raises(BrokenWeights, match="version 0: the probe's log-probabilities are not finite"):
        broadcaster.publish(lone.model, lone.run)
    assert list(broadcaster.directory.iterdir()) == []


def test_a_broadcast_carries_the_tokenizer_of_its_model(dense_directory: Path, tmp_path: Path) -> None:
    lone = make_lone_run(tmp_path, dense_directory)
    (dense_directory / "tokenizer.json").write_text("{}")
    Broadcaster(lone.learner.manager, tmp_path, "default", str(dense_directory), keep=2).publish(lone.model, lone.run)
    names = {path.name for path in (tmp_path / "run_default" / "broadcast" / "step_0").iterdir()}
    assert {"tokenizer.json", "config.json", "model.safetensors", "probe.json", "STABLE"} <= names
    (dense_directory / "tokenizer.json").unlink()


def test_metrics_of_repeated_steps_are_removed(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.truncate({"a": 0})
    for run_id, step in (("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 3)):
        metrics.append({"run_id": run_id, "step": step, "loss": 0.5})
    with metrics.path.open("ab") as file:
        file.write(b'{"run_id": "a", "st{"run_id": "b", "step": 3}\n{"run_id": "b", "st')
    metrics.truncate({"a": 1})
    left = [json.loads(line) for line in metrics.path.read_text().splitlines()]
    assert [(line["run_id"], line["step"]) for line in left] == [("a", 1), ("b", 1), ("b", 2)]


def test_metrics_are_read_no_further_back_than_the_step_that_training_goes_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    lines: list[dict[str, Any]] = [
        {"run_id": run_id, "step": step, "pad": "x" * 100} for step in range(1, 3001) for run_id in ("a", "b")
    ]
    metrics.path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    read = 0
    pread = os.pread

    def counted(descriptor: int, length: int, offset: int) -> bytes:
        nonlocal read
        read += length
        return pread(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", counted)
    metrics.truncate({"a": 2998})
    assert read <= 2**16
    left = [json.loads(line) for line in metrics.path.read_text().splitlines()]
    assert left == [line for line in lines if line["run_id"] == "b" or line["step"] <= 2998]


def test_metrics_of_many_runs_are_read_back_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is what truncating them one by one leaves."""
    runs = [f"run-{number}" for number in range(50)]
    lines: list[dict[str, Any]] = [
        {"run_id": run_id, "step": step, "loss": step / 2, "pad": "x" * 500} for step in range(1, 21) for run_id in runs
    ]
    together, one_by_one = MetricsFile(tmp_path / "together.jsonl"), MetricsFile(tmp_path / "one_by_one.jsonl")
    for metrics in (together, one_by_one):
        metrics.path.write_bytes(
            b"".join(json.dumps(line).encode() + b"\n" for line in lines) + b'{"run_id": "run-1", "st'
        )
    steps = {run_id: 20 - number % 3 for number, run_id in enumerate(runs)}
    for run_id, step in steps.items():
        one_by_one.truncate({run_id: step})
    read, pread = 0, os.pread

    def counted(descriptor: int, length: int, offset: int) -> bytes:
        nonlocal read
        read += length
        return pread(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", counted)
    together.truncate(steps)
    newest = together.newest(runs, "loss", 2)
    assert read <= together.path.stat().st_size + 2 * 2**16
    assert together.path.read_bytes() == one_by_one.path.read_bytes()
    assert newest == {run_id: [(step - 1) / 2, step / 2] for run_id, step in steps.items()}


def test_checkpoints_of_runs_that_were_deleted_meanwhile_are_set_aside(tmp_path: Path) -> None:
    for run_id in ("kept", "deleted"):
        (tmp_path / "trainer" / run_id / "checkpoints" / "step_1").mkdir(parents=True)
    (tmp_path / "run_kept").mkdir()
    for content in ("once", "twice"):
        (tmp_path / "trainer" / "deleted" / "checkpoints").mkdir(parents=True, exist_ok=True)
        (tmp_path / "trainer" / "deleted" / "checkpoints" / content).touch()
        checkpoint.set_aside_deleted(tmp_path)
    assert sorted(path.name for path in (tmp_path / "trainer").iterdir()) == [
        ".deleted-deleted",
        ".deleted-deleted~2",
        "kept",
    ]
    found = checkpoint.were_set_aside(tmp_path, "deleted")
    assert [path.name for aside in found for path in aside.glob("checkpoints/*ce")] == ["once", "twice"]
    assert checkpoint.were_set_aside(tmp_path, "delete") == []


def test_the_epoch_of_a_run_that_was_deleted_before_its_first_checkpoint_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / "trainer" / "deleted").mkdir(parents=True)
    (tmp_path / "trainer" / "deleted" / "epoch.json").touch()
    checkpoint.set_aside_deleted(tmp_path)
    assert [path.name for path in (tmp_path / "trainer").iterdir()] == [".deleted-deleted"]
