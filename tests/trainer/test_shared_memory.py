"""Full weights that are published in shared memory: what is where, how much there may be, and what a killed trainer leaves."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import orjson
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from counterpoint.inference import delta
from counterpoint.inference.checkpoint import is_delta
from counterpoint.inference.digest import digests_of
from counterpoint.trainer import shared_memory
from counterpoint.trainer.broadcast import Broadcaster, Form, own_memory
from counterpoint.trainer.runs import checkpoint, control_files
from counterpoint.trainer.shared_memory import SharedMemory, has_lost_weights, remove_left_weights
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.messages import Hello
from tests.trainer.conftest import make_batch
from tests.trainer.lone_run import LoneRun, make_lone_run
from tests.trainer.one_process_trainer import Death, Deaths, Life, life, write_member


@pytest.fixture
def memory_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for /dev/shm: a directory of this test's own."""
    root = tmp_path / "memory"
    root.mkdir()
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", root)
    return root


def make_broadcaster(lone: LoneRun, output_dir: Path, memory: SharedMemory | None, keep: int = 2) -> Broadcaster:
    model = lone.learner.config.model
    return Broadcaster(lone.learner.manager, output_dir, "default", model, keep, whole_every=3, memory=memory)


def weights_of(published: Path, scratch: Path) -> dict[str, Tensor]:
    """What a reader of a version gets. Fails unless it has the digest that it says."""
    copy = Path(shutil.copytree(published, scratch))
    if is_delta(copy):
        delta.make_whole(copy)
    found = load_file(copy / "model.safetensors")
    assert digests_of(found) == orjson.loads((published / "probe.json").read_bytes())["digests"], published
    shutil.rmtree(copy)
    return found


def links(published: Path) -> list[str]:
    return sorted(str(file.relative_to(published)) for file in published.rglob("*.safetensors") if file.is_symlink())


def publish_next(lone: LoneRun, broadcaster: Broadcaster) -> None:
    """Publishes a version in which a few weights have changed."""
    lone.run.progress.step += 1
    with torch.no_grad():
        lone.model.get_input_embeddings().weight[0] += 1.0
    broadcaster.publish(lone.model, lone.run)


@pytest.mark.slow
def test_versions_are_in_memory_and_those_of_checkpoints_on_the_disk(
    dense_directory: Path, tmp_path: Path, memory_root: Path
) -> None:
    lone = make_lone_run(tmp_path, dense_directory, {"dtype": "bfloat16"}, learning_rate=1e-6, steps=9)
    memory = SharedMemory()
    broadcaster = make_broadcaster(lone, tmp_path, memory)
    published = tmp_path / "run_default" / "broadcast"
    (own,) = memory_root.iterdir()
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    linked = []
    for step in range(6):
        if step:
            lone.train(make_batch(step))
        broadcaster.publish(lone.model, lone.run)
        if step == 4:
            memory.make_durable(published / "step_4")
            checkpoint.write(checkpoint.take(lone.run), tmp_path, keep=2)
        found = weights_of(published / f"step_{step}", tmp_path / "scratch")
        trained = own_memory(lone.model.state_dict())
        assert all(torch.equal(found[name].view(torch.int16), trained[name].view(torch.int16)) for name in trained)
        linked.append(links(published / f"step_{step}"))
        assert len(list(own.rglob("step_*"))) <= 2, "as many as are kept"
    changed = ["base/model.safetensors", "delta.safetensors"]
    whole = ["model.safetensors"]
    assert linked == [[], whole, changed, changed, [], changed], "the first on the disk, the fourth by its checkpoint"
    assert links(published / "step_5") == changed
    memory.close()
    assert list(memory_root.iterdir()) == []
    assert published_steps(published) == [4], "what was in memory alone is gone with it"
    weights_of(published / "step_4", tmp_path / "scratch")


@pytest.mark.slow
def test_what_does_not_fit_is_published_on_the_disk(
    dense_directory: Path,
    tmp_path: Path,
    memory_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whether it is known before, or the room is taken by others while it is written."""
    lone = make_lone_run(tmp_path, dense_directory, steps=9)
    memory = SharedMemory()
    broadcaster = make_broadcaster(lone, tmp_path, memory)
    published = tmp_path / "run_default" / "broadcast"
    broadcaster.publish(lone.model, lone.run)

    class Full:
        f_bavail, f_frsize = 10, 4096

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(os, "statvfs", lambda path: Full)
        for _ in range(2):
            publish_next(lone, broadcaster)
    assert [record.message for record in caplog.records if "40960 are free in" in record.message] == [
        record.message for record in caplog.records
    ]
    assert len(caplog.records) == 1, "said once"
    assert links(published / "step_2") == []
    write = Form.write

    def lacks_room(form: Form, weights: Mapping[str, Tensor], directory: Path) -> None:
        if directory.is_relative_to(memory_root):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(form, weights, directory)

    with monkeypatch.context() as patched:
        patched.setattr(Form, "write", lacks_room)
        publish_next(lone, broadcaster)
    assert links(published / "step_3") == []
    assert list(memory_root.rglob("step_*")) == []
    publish_next(lone, broadcaster)
    assert links(published / "step_4") == ["model.safetensors"]
    for step in (3, 4):
        weights_of(published / f"step_{step}", tmp_path / "scratch")


def kill(memory: SharedMemory) -> None:
    """As the end of its process does it: the lock is free, and nothing is removed."""
    if (found := memory._own._remove.detach()) is not None:  # it was not on its way to its end anyhow
        os.close(found[2][1])


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_whole_versions_and_no_memory(
    dense_directory: Path, tmp_path: Path, memory_root: Path
) -> None:
    """Between any two file operations: published versions can be read until the next start, which takes the memory back."""
    lone = make_lone_run(tmp_path, dense_directory, steps=9)
    given = {name: tensor.clone() for name, tensor in lone.model.state_dict().items()}
    kills = begun = operations_of_version_0(lone, tmp_path)
    finished = False
    while not finished:
        deaths = Deaths()
        deaths.due = kills
        lone.run.progress.step = 0
        lone.model.load_state_dict(given)
        with pytest.MonkeyPatch.context() as patched:
            memory: SharedMemory | None = None
            deaths.install(patched)
            patched.setattr(os, "symlink", deaths._watched("symlink", os.symlink))
            try:
                memory = SharedMemory()
                one_life(lone, memory, tmp_path)
                finished = True
            except Death:
                kills += 1
        if memory is not None and not finished:
            kill(memory)
        published = tmp_path / "run_default" / "broadcast"
        if not finished:
            for step in published_steps(published):
                weights_of(published / f"step_{step}", tmp_path / "scratch")
        after = SharedMemory()
        remove_left_weights()
        assert len(list(memory_root.iterdir())) == 1, deaths.seen[-1]
        broadcaster = make_broadcaster(lone, tmp_path, after)
        newest = max(published_steps(published), default=0)
        broadcaster.remove_beyond(newest)
        assert not any(has_lost_weights(published / f"step_{step}") for step in published_steps(published))
        lone.run.progress.step = newest
        broadcaster.publish(lone.model, lone.run)
        after.close()
        assert list(memory_root.iterdir()) == []
        assert not any(links(published / f"step_{step}") for step in published_steps(published))
        shutil.rmtree(published)
    assert kills > begun + 50


def operations_of_version_0(lone: LoneRun, output_dir: Path) -> int:
    """File operations before the first version in memory: what is killed there is as without it."""
    with pytest.MonkeyPatch.context() as patched:
        (seen := Deaths()).install(patched)
        memory = SharedMemory()
        make_broadcaster(lone, output_dir, memory).publish(lone.model, lone.run)
        counted = len(seen.seen)
        memory.close()
    shutil.rmtree(output_dir / "run_default" / "broadcast")
    return counted


def one_life(lone: LoneRun, memory: SharedMemory, output_dir: Path) -> None:
    """Versions 0 to 3, whole and as what changed, of which two are kept. 2 gets a checkpoint."""
    broadcaster = make_broadcaster(lone, output_dir, memory)
    broadcaster.publish(lone.model, lone.run)
    for step in range(1, 4):
        publish_next(lone, broadcaster)
        if step == 2:
            memory.make_durable(broadcaster.directory / "step_2")
    memory.close()


@pytest.mark.slow
def test_a_trainer_gives_the_memory_of_a_killed_one_back(
    dense_directory: Path, tmp_path: Path, memory_root: Path
) -> None:
    """Also if it publishes files itself; a live trainer's stays."""
    script = (
        "import sys, time; from pathlib import Path; from counterpoint.trainer import shared_memory\n"
        "shared_memory.SHARED_MEMORY = Path(sys.argv[1]); memory = shared_memory.SharedMemory()\n"
        "memory.make(Path('run_a/broadcast/step_1'), 1); print('ready', flush=True); time.sleep(600)"
    )
    others = [
        subprocess.Popen([sys.executable, "-c", script, str(memory_root)], stdout=subprocess.PIPE) for _ in range(2)
    ]
    try:
        for other in others:
            assert other.stdout is not None
            assert other.stdout.readline() == b"ready\n"
            other.stdout.close()
        others[0].kill()
        others[0].wait()
        assert len(list(memory_root.rglob("step_1"))) == 2
        write_member(tmp_path, dense_directory, "default")
        with life(tmp_path, dense_directory, {"default": 0}) as one:
            one.turn_until(lambda: len(list(memory_root.rglob("step_1"))) == 1, "the memory of the killed one")
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.slow
def test_a_trainer_publishes_in_memory_and_leaves_its_last_version_on_the_disk(
    dense_directory: Path, tmp_path: Path, memory_root: Path
) -> None:
    """Also after a kill, when the last checkpoint is older than what was published."""
    settings = {"max_runs": 1, "broadcast": "memory", "keep_broadcasts": 2}
    write_member(tmp_path, dense_directory, "default", lora=None, checkpoint_interval=2)
    published = tmp_path / "run_default" / "broadcast"
    killed = Life(tmp_path, dense_directory, {"default": 3}, **settings)
    killed.until_step(default=3)
    assert links(published / "step_3") == ["model.safetensors"]
    assert links(published / "step_2") == [], "a checkpoint goes back to it"
    expected = weights_of(published / "step_3", tmp_path / "scratch")
    memory = killed.trainer._memory
    assert memory is not None
    kill(memory)
    killed.trainer._memory = None
    killed.close()
    (tmp_path / "trainer" / "default").rename(tmp_path / "away")  # a trainer without its disk, which must not begin
    with life(tmp_path, dense_directory, {}, **settings) as behind:
        behind.wire.say("default", Hello("default", 2))
        behind.turn_until(lambda: "default" in behind.wire.evicted, "the refusal")
        weights_of(published / "step_3", tmp_path / "scratch")
        assert f"cp -rL {published / 'step_3'} " in behind.wire.evicted["default"], "the only copy, for now"
    shutil.rmtree(tmp_path / "trainer" / "default", ignore_errors=True)
    (tmp_path / "away").rename(tmp_path / "trainer" / "default")
    write_member(tmp_path, dense_directory, "default", lora=None, checkpoint_interval=2)
    with life(tmp_path, dense_directory, {"default": 6}, **settings) as second:
        second.until_step(default=3)
        again = weights_of(published / "step_3", tmp_path / "scratch")
        assert all(torch.equal(again[name], expected[name]) for name in expected)
        assert len(list(memory_root.iterdir())) == 1
        second.until_step(default=6)
    assert list(memory_root.iterdir()) == []
    assert published_steps(published) == [6]
    assert links(published / "step_6") == []
    weights_of(published / "step_6", tmp_path / "scratch")


@pytest.mark.slow
def test_a_run_that_leaves_gives_its_memory_back(dense_directory: Path, tmp_path: Path, memory_root: Path) -> None:
    """And not only when the next run comes. The checkpoint that it gets then has its last version."""
    write_member(tmp_path, dense_directory, "default", lora=None, checkpoint_interval=9)
    published = tmp_path / "run_default" / "broadcast"
    with life(
        tmp_path, dense_directory, {"default": 3}, max_runs=1, broadcast="memory", keep_broadcasts=2, stay=True
    ) as one:
        one.until_step(default=3)
        assert links(published / "step_3") == ["model.safetensors"]
        control_files.evict(tmp_path, "default", "made up")
        one.turn_until(lambda: one.step_of("default") < 0, "the end of the run")
        one.turn_until(lambda: not list(memory_root.rglob("step_*")), "its memory")
        assert published_steps(published) == [3]
        assert links(published / "step_3") == []
        weights_of(published / "step_3", tmp_path / "scratch")
