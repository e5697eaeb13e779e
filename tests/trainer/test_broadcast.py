"""What a broadcast leaves on the disk, beside what inference loads from it."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import load_file

from counterpoint.inference import delta
from counterpoint.inference.checkpoint import BASE, DELTA, is_delta
from counterpoint.inference.digest import DTYPES, digests_of
from counterpoint.run.receipts import RECEIPTS_FILE, head_of, published_weights
from counterpoint.trainer.broadcast import Broadcaster, own_memory
from counterpoint.trainer.runs.witness import FILE
from counterpoint.transport.files.atomic import published_steps
from tests.trainer.conftest import make_batch
from tests.trainer.lone_run import make_lone_run
from tests.trainer.one_process_trainer import life, write_member


@pytest.fixture(params=[0o022, 0o027, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_the_umask_says_who_may_read_a_broadcast(
    dense_directory: Path, tmp_path: Path, umask: int, lora: dict[str, Any] | None
) -> None:
    """Inference may run as another user of the same group."""
    lone = make_lone_run(tmp_path, dense_directory, lora=lora)
    Broadcaster(lone.learner.manager, tmp_path, "default", str(dense_directory), 2).publish(lone.model, lone.run)
    files = list((tmp_path / "run_default" / "broadcast" / "step_0").iterdir())
    assert ("adapter_model.safetensors" if lora else "model.safetensors") in {file.name for file in files}
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask, file.name


@pytest.mark.slow
def test_a_generation_configuration_that_transformers_does_not_write_is_copied(
    dense_directory: Path, tmp_path: Path
) -> None:
    """As some models of the hub have it: `temperature` has no meaning without `do_sample`."""
    model = shutil.copytree(dense_directory, tmp_path / "model")
    (model / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6, "eos_token_id": 7}')
    lone = make_lone_run(tmp_path / "out", model)
    Broadcaster(lone.learner.manager, tmp_path / "out", "default", str(model), 2).publish(lone.model, lone.run)
    published = tmp_path / "out" / "run_default" / "broadcast" / "step_0" / "generation_config.json"
    assert published.read_bytes() == (model / "generation_config.json").read_bytes()


@pytest.mark.slow
def test_most_versions_of_bfloat16_weights_are_published_as_what_changed(dense_directory: Path, tmp_path: Path) -> None:
    """Each has its base, and gives the trained weights bit for bit; the last is whole."""
    lone = make_lone_run(tmp_path, dense_directory, {"dtype": "bfloat16"}, learning_rate=1e-6)
    broadcaster = Broadcaster(lone.learner.manager, tmp_path, "default", str(dense_directory), 2, whole_every=3)
    kinds = []
    for step in range(5):
        if step:
            lone.train(make_batch(step))
        broadcaster.publish(lone.model, lone.run)
        directory = tmp_path / "run_default" / "broadcast" / f"step_{step}"
        kinds.append("delta" if is_delta(directory) else "whole")
        if is_delta(directory):
            assert (directory / "config.json").is_file()
            assert delta_bytes(directory) < whole_bytes(directory) / 3
            delta.check(directory)
            directory = Path(shutil.copytree(directory, tmp_path / f"whole_{step}"))
            delta.make_whole(directory)
        published = load_file(directory / "model.safetensors")
        trained = own_memory(lone.model.state_dict())
        assert published.keys() == trained.keys()
        for name, tensor in trained.items():
            assert torch.equal(published[name].view(torch.int16), tensor.view(torch.int16)), (step, name)
        said = orjson.loads((directory / "probe.json").read_bytes())["digests"]
        assert said == digests_of(published)
    assert kinds == ["whole", "delta", "delta", "whole", "whole"], "the first, every third, and the last"


@pytest.mark.slow
def test_each_version_is_noted_before_it_appears(dense_directory: Path, tmp_path: Path) -> None:
    """The note has the batch and the newest receipt. A process that finds its version published notes that it began anew."""
    lone = make_lone_run(tmp_path, dense_directory)
    receipts = tmp_path / "run_default" / RECEIPTS_FILE

    def broadcaster() -> Broadcaster:
        return Broadcaster(lone.learner.manager, tmp_path, "default", str(dense_directory), 2)

    first = broadcaster()
    first.publish(lone.model, lone.run)
    receipts.write_bytes(b'{"step": 1}\n{"step": 2')
    lone.train(make_batch(1))
    lone.run.progress.batch = "of step 1"
    first.publish(lone.model, lone.run)
    broadcaster().publish(lone.model, lone.run)
    lines = [orjson.loads(line) for line in (tmp_path / "trainer/default" / FILE).read_bytes().splitlines()]
    weights = [published_weights(tmp_path / f"run_default/broadcast/step_{step}") for step in (0, 1)]
    one = {"step": 1, "batch": "of step 1", "weights": weights[1], "head": head_of(b'{"step": 1}')}
    assert lines == [{"step": 0, "batch": "", "weights": weights[0], "head": ""}, one, one]
    receipts.unlink()
    os.mkfifo(receipts)
    lone.train(make_batch(2))
    first.publish(lone.model, lone.run)
    assert published_steps(tmp_path / "run_default/broadcast") == [1, 2], "a FIFO is not waited for"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "repeats"), [("dense", True), ("moe", False)])
def test_later_versions_are_written_as_transformers_writes_them(
    kind: str, repeats: bool, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mixture's weights have other names in the files than in the model, so that transformers writes each version."""
    directory = request.getfixturevalue(f"{kind}_directory")
    lone = make_lone_run(tmp_path, directory)
    saved: list[Path] = []
    save = type(lone.model).save_pretrained

    def note(model: Any, directory: Path, **more: Any) -> None:
        saved.append(directory)
        save(model, directory, **more)

    monkeypatch.setattr(type(lone.model), "save_pretrained", note)
    broadcaster = Broadcaster(lone.learner.manager, tmp_path, "default", str(directory), 2)
    broadcaster.publish(lone.model, lone.run)
    lone.train(make_batch(1))
    broadcaster.publish(lone.model, lone.run)
    assert len(saved) == (1 if repeats else 2)
    published = tmp_path / "run_default" / "broadcast" / "step_1"
    save(lone.model, tmp_path / "expected")
    for expected in (tmp_path / "expected").iterdir():
        if expected.name != "generation_config.json":  # it is the model's own
            assert (published / expected.name).read_bytes() == expected.read_bytes(), expected.name
    assert load_file(published / "model.safetensors").keys() == load_file(directory / "model.safetensors").keys()


@pytest.mark.slow
@pytest.mark.parametrize("whole_every", [1, 9])
def test_weights_that_transformers_converts_under_their_names_are_converted_in_every_version(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_every: int
) -> None:
    """As it permutes the heads of some models: names and shapes are those of the model, and the values are others."""
    lone = make_lone_run(tmp_path, dense_directory, {"dtype": "bfloat16"}, learning_rate=1e-6)
    save = type(lone.model).save_pretrained

    def convert(model: Any, directory: Path, state_dict: dict[str, Any]) -> None:
        changed = {name: as_written(name, tensor) for name, tensor in state_dict.items()}
        save(model, directory, state_dict=changed)

    def as_written(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flip(0).contiguous() if name.endswith("layers.1.self_attn.o_proj.weight") else tensor

    monkeypatch.setattr(type(lone.model), "save_pretrained", convert)
    broadcaster = Broadcaster(lone.learner.manager, tmp_path, "default", str(dense_directory), 2, whole_every)
    for step in range(3):
        if step:
            lone.train(make_batch(step))
        broadcaster.publish(lone.model, lone.run)
        directory = Path(shutil.copytree(tmp_path / f"run_default/broadcast/step_{step}", tmp_path / f"copy_{step}"))
        if is_delta(directory):
            delta.make_whole(directory)
        published = load_file(directory / "model.safetensors")
        for name, tensor in own_memory(lone.model.state_dict()).items():
            assert torch.equal(published[name], as_written(name, tensor)), (step, name)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_broadcast_has_a_digest_for_each_precision_of_the_servers(
    dense_directory: Path, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    lone = make_lone_run(tmp_path, dense_directory, lora=lora)
    digests = []
    for place, precisions in (("all", list(DTYPES)), ("one", ["bfloat16"])):
        broadcaster = Broadcaster(
            lone.learner.manager, tmp_path / place, "default", str(dense_directory), 2, precisions=precisions
        )
        (tmp_path / place / "run_default").mkdir(parents=True)
        broadcaster.publish(lone.model, lone.run)
        probe = tmp_path / place / "run_default" / "broadcast" / "step_0" / "probe.json"
        digests.append(orjson.loads(probe.read_bytes())["digests"])
    assert digests[0].keys() == DTYPES.keys()
    assert digests[1] == {"bfloat16": digests[0]["bfloat16"]}


def delta_bytes(directory: Path) -> int:
    return (directory / DELTA).stat().st_size


def whole_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in (directory / BASE).iterdir())


@pytest.mark.slow
def test_what_changed_in_most_elements_is_published_whole(dense_directory: Path, tmp_path: Path) -> None:
    lone = make_lone_run(tmp_path, dense_directory, learning_rate=1e-3)
    broadcaster = Broadcaster(lone.learner.manager, tmp_path, "default", str(dense_directory), 2, whole_every=3)
    for step in range(3):
        if step:
            lone.train(make_batch(step))
        broadcaster.publish(lone.model, lone.run)
        directory = tmp_path / "run_default" / "broadcast" / f"step_{step}"
        assert (directory / "model.safetensors").is_file()
        assert not (directory / BASE).exists()


def test_broadcasts_that_lead_elsewhere_are_left_alone(dense_directory: Path, tmp_path: Path) -> None:
    """Such as to those of another run, of which the newer would be removed."""
    lone = make_lone_run(tmp_path, dense_directory)
    (tmp_path / "run_other" / "broadcast" / "step_7").mkdir(parents=True)
    (tmp_path / "run_other" / "broadcast" / "step_7" / "STABLE").touch()
    (tmp_path / "run_default" / "broadcast").symlink_to(tmp_path / "run_other" / "broadcast")
    broadcaster = Broadcaster(lone.learner.manager, tmp_path, "default", str(dense_directory), 2)
    with pytest.raises(OSError, match=r"leads to .*run_other"):
        broadcaster.remove_beyond(0)
    with pytest.raises(OSError, match=r"leads to .*run_other"):
        broadcaster.publish(lone.model, lone.run)
    assert published_steps(tmp_path / "run_other" / "broadcast") == [7]


def test_another_jobs_checkpoints_to_which_broadcasts_lead_are_left_alone(
    dense_directory: Path, tmp_path: Path
) -> None:
    job, other = tmp_path / "job", tmp_path / "other" / "checkpoints"
    lone = make_lone_run(job, dense_directory)
    (other / "step_7").mkdir(parents=True)
    (other / "step_7" / "STABLE").touch()
    (job / "run_default" / "broadcast").symlink_to(other)
    broadcaster = Broadcaster(lone.learner.manager, job, "default", str(dense_directory), 2)
    with pytest.raises(OSError, match=r"leads to .*other/checkpoints, .*step_7"):
        broadcaster.remove_beyond(-1)
    with pytest.raises(OSError, match="is no broadcast"):
        broadcaster.publish(lone.model, lone.run)
    assert published_steps(other) == [7]


@pytest.mark.slow
@pytest.mark.parametrize("other_disk", [False, True])
def test_a_full_disk_to_which_broadcasts_lead_evicts_its_run_alone(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_disk: bool
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for run_id in ("one", "other"):
        write_member(tmp_path, dense_directory, run_id)
    with (
        life(tmp_path, dense_directory, {"one": 1, "other": 1}) as one,
        tempfile.TemporaryDirectory(dir="/dev/shm") as shm,
    ):
        one.until_step(one=1, other=1)
        if other_disk:
            broadcasts = tmp_path / "run_one" / "broadcast"
            broadcasts.rename(broadcasts.with_name("away"))
            broadcasts.symlink_to(shm)
        broadcaster = one.trainer.shared.broadcasters[one.run("one").slot]
        monkeypatch.setattr(broadcaster, "publish", full)
        one.wire.committed |= {"one": 2, "other": 3}
        with nullcontext() if other_disk else pytest.raises(OSError, match="No space left"):
            one.until_step(other=3)
            one.turn_until(lambda: "one" in one.wire.evicted, "the eviction")
            assert "No space left" in one.wire.evicted["one"]
