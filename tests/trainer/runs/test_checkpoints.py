"""Checkpoints that are written while training goes on: exact, in order, and durable only once they are on the disk."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from counterpoint.job.population.exploit import outcome, request_save, wait
from counterpoint.run.trainer_files import checkpoints_directory
from counterpoint.trainer.broadcast import Broadcaster
from counterpoint.trainer.runs import checkpoint, control_files
from counterpoint.trainer.runs.checkpoint import Snapshot
from counterpoint.trainer.runs.checkpoints import Checkpoints
from counterpoint.trainer.runs.run import Run, Shards
from counterpoint.trainer.runs.shard_files import write_own
from counterpoint.trainer.runs.slices import OtherSlices
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.telemetry.spans import SpanLog
from tests.support.polling import DEADLINE_SECONDS, wait_until
from tests.trainer.conftest import make_batch
from tests.trainer.lone_run import make_lone_run
from tests.trainer.one_process_trainer import STEPS, Death, Deaths, life, saved_state, write_population

pytestmark = pytest.mark.slow


class Disk:
    """Writes a checkpoint when it is let, one at a time; or lets it be seen, but has not flushed it until then."""

    def __init__(self, *, seen_early: bool) -> None:
        self.seen_early = seen_early
        self.begun = threading.Semaphore(0)
        self._may_write = threading.Semaphore(0)
        self._write = checkpoint.write

    def write(self, snapshot: Snapshot, output_dir: Path, keep: int, wait_for_broadcast: Callable[[], object]) -> None:
        if self.seen_early:
            self._write(snapshot, output_dir, keep, wait_for_broadcast)
        self.begun.release()
        assert self._may_write.acquire(timeout=DEADLINE_SECONDS)
        if not self.seen_early:
            self._write(snapshot, output_dir, keep, wait_for_broadcast)

    def go_on(self, checkpoints: int = 1) -> None:
        self._may_write.release(checkpoints)


@contextmanager
def slow_disk(monkeypatch: pytest.MonkeyPatch, *, seen_early: bool = False) -> Iterator[Disk]:
    """Everything that waits is written in the end."""
    disk = Disk(seen_early=seen_early)
    monkeypatch.setattr(checkpoint, "write", disk.write)
    try:
        yield disk
    finally:
        disk.go_on(1000)


def state_of(one: Any, run_id: str) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in one.run(run_id).torch.optimizer.state().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def durable(one: Any, run_id: str) -> int:
    """What the orchestrator may have dropped."""
    run = one.manager.registry.taking(run_id)
    assert run is not None
    return int(run.durable_step)


def test_training_goes_on_meanwhile_and_the_checkpoint_is_of_its_step(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_population(tmp_path, dense_directory, checkpoint_interval=2)
    committed = {"winner": 2, "loser": 2, "third": 0}
    with life(tmp_path, dense_directory, committed, keep_checkpoints=1) as one, slow_disk(monkeypatch) as disk:
        one.waits_for_the_disk = False
        one.until_step(winner=2, loser=2)
        states = {run_id: state_of(one, run_id) for run_id in ("winner", "loser")}
        assert disk.begun.acquire(timeout=DEADLINE_SECONDS)
        committed |= {"winner": 3, "loser": 3}
        one.until_step(winner=3, loser=3)
        assert not same(states["winner"], state_of(one, "winner"))
        assert [durable(one, run_id) for run_id in states] == [0, 0], "nothing is on the disk"
        disk.go_on(2)
        one.turn_until(lambda: durable(one, "winner") == durable(one, "loser") == 2, "both checkpoints")
        for run_id, state in states.items():
            assert same(saved_state(tmp_path, run_id, 2), state)


@pytest.mark.parametrize("how", ["evicted", "deleted"])
def test_a_run_leaves_while_its_checkpoint_is_on_its_way(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    write_population(tmp_path, dense_directory, checkpoint_interval=2)
    committed = {"winner": 3, "loser": 3, "third": 0}
    with life(tmp_path, dense_directory, committed) as one, slow_disk(monkeypatch) as disk:
        one.waits_for_the_disk = False
        one.until_step(winner=3, loser=0)
        assert disk.begun.acquire(timeout=DEADLINE_SECONDS)
        if how == "evicted":
            control_files.evict(tmp_path, "winner", "an operator wants it")
        else:
            shutil.rmtree(tmp_path / "run_winner")
        threading.Timer(0.2, disk.go_on, (1000,)).start()  # it is waited for
        one.turn_until(lambda: one.step_of("winner") == -1, "the leaving")
        one.until_step(loser=3)
        kept = tmp_path / "trainer" / ("winner" if how == "evicted" else ".deleted-winner")
        assert 2 in published_steps(kept / "checkpoints")


def test_a_run_has_one_checkpoint_on_its_way_and_the_last_step_needs_its_own(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last but one is late: it does not make the last step durable, although that is trained."""
    write_population(tmp_path, dense_directory, checkpoint_interval=STEPS - 1)
    committed = {"winner": STEPS, "loser": 0, "third": 0}
    with life(tmp_path, dense_directory, committed, keep_checkpoints=1) as one, slow_disk(monkeypatch) as disk:
        one.waits_for_the_disk = False
        one.until_step(winner=STEPS - 1)
        assert disk.begun.acquire(timeout=DEADLINE_SECONDS)
        seen: list[int] = []
        durables = one.trainer.shared.sessions.durable

        def noted(run: Run) -> None:
            seen.append(run.durable_step)
            durables(run)

        monkeypatch.setattr(one.trainer.shared.sessions, "durable", noted)
        disk.go_on()  # the wait for the first ends, and the second is begun
        one.until_step(winner=STEPS)
        assert disk.begun.acquire(timeout=DEADLINE_SECONDS)
        assert durable(one, "winner") == STEPS - 1
        assert one.trainer._over() is False
        disk.go_on()
        one.turn_until(lambda: durable(one, "winner") == STEPS, "the last checkpoint")
        assert seen == [STEPS - 1, STEPS]


@pytest.mark.parametrize("fails", [False, True])
def test_the_broadcast_is_flushed_while_the_state_is_written_and_before_it_is_published(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """A resume reads both. If the broadcast cannot be flushed there is no checkpoint."""
    lone = make_lone_run(tmp_path, dense_directory)
    broadcaster = Broadcaster(lone.learner.manager, tmp_path, "default", str(dense_directory), keep=9)
    lone.train(make_batch(1))
    broadcaster.publish(lone.model, lone.run)
    parent, may_flush = checkpoints_directory(tmp_path, "default"), threading.Event()
    flushed: list[Path] = []

    def flush(broadcast: Path) -> None:
        assert may_flush.wait(DEADLINE_SECONDS)
        flushed.append(broadcast)
        if fails:
            raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(checkpoint, "flush_broadcast", flush)
    spans = SpanLog(tmp_path / "spans.jsonl", "trainer")
    with closing(Checkpoints(tmp_path, 9, nullcontext, str, spans)) as checkpoints:
        assert checkpoints.begin(lone.run)
        wait_until(lambda: any(parent.glob("*/state.json")), "the state to be written")
        assert published_steps(parent) == []
        may_flush.set()
        if fails:
            with pytest.raises(OSError, match="the disk is broken"):
                checkpoints.complete()
        else:
            checkpoints.complete()
    assert flushed == [tmp_path / "run_default" / "broadcast" / "step_1"]
    assert published_steps(parent) == ([] if fails else [1])


@pytest.mark.parametrize("seen_early", [False, True])
def test_a_save_is_answered_once_it_is_durable_while_training_goes_on(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen_early: bool
) -> None:
    write_population(tmp_path, dense_directory, checkpoint_interval=99)
    committed = {"winner": 2, "loser": 0, "third": 0}
    with life(tmp_path, dense_directory, committed) as one, slow_disk(monkeypatch, seen_early=seen_early) as disk:
        one.waits_for_the_disk = False
        one.until_step(winner=2)
        state = state_of(one, "winner")
        request = request_save(tmp_path, "winner")
        one.turn()
        assert disk.begun.acquire(timeout=DEADLINE_SECONDS)
        committed["winner"] = 4
        one.until_step(winner=4)
        assert outcome(tmp_path, "winner", request) is None
        disk.go_on()
        one.turn_until(lambda: outcome(tmp_path, "winner", request) is not None, "the answer")
        assert wait(tmp_path, "winner", request, 0).step == 2
        assert same(saved_state(tmp_path, "winner", 2), state)
        assert published_steps(tmp_path / "trainer" / "winner" / "saved") == [2]


def test_a_run_deleted_meanwhile_leaves_nothing_under_its_name(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_population(tmp_path, dense_directory, checkpoint_interval=2)
    committed = {"winner": 2, "loser": 2, "third": 0}
    with life(tmp_path, dense_directory, committed) as one, slow_disk(monkeypatch) as disk:
        one.waits_for_the_disk = False
        one.until_step(winner=2, loser=2)
        assert disk.begun.acquire(timeout=DEADLINE_SECONDS)
        (tmp_path / "run_winner").rename(tmp_path / "deleted")
        disk.go_on(2)
        one.turn_until((tmp_path / "trainer" / ".deleted-winner").exists, "the checkpoints set aside")
        assert published_steps(tmp_path / "trainer" / ".deleted-winner" / "checkpoints") == [2]
        assert not (tmp_path / "trainer" / "winner").exists()
        committed["loser"] = 4
        one.until_step(loser=4)


def test_a_full_disk_is_reported_by_the_next_pass_and_the_last_checkpoint_is_whole(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_population(tmp_path, dense_directory, checkpoint_interval=2)
    committed = {"winner": 2, "loser": 0, "third": 0}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with life(tmp_path, dense_directory, committed) as one:
        one.until_step(winner=2)
        state = state_of(one, "winner")
        with monkeypatch.context() as patched:
            patched.setattr(checkpoint, "save_file", full)
            committed["winner"] = 4
            with pytest.raises(OSError, match="No space left"):
                one.until_step(winner=5)
    assert [path.name for path in checkpoints_directory(tmp_path, "winner").iterdir()] == ["step_2"]
    with life(tmp_path, dense_directory, committed) as again:
        again.turn_until(lambda: again.step_of("winner") >= 2, "the run")
        assert same(saved_state(tmp_path, "winner", 2), state)
        again.until_step(winner=4)


def test_a_rank_lost_while_it_writes_its_slice_ends_the_wait_and_leaves_the_last_one_whole(
    dense_directory: Path, tmp_path: Path
) -> None:
    lone, answers = make_lone_run(tmp_path, dense_directory), iter([[], [1]])

    def ask() -> list[int]:
        answer = next(answers, None)
        if answer is None:
            written = checkpoints_directory(tmp_path, "default") / ".step_2.partial" / "state.safetensors"
            wait_until(written.exists, "the wait for the other rank")
            raise RuntimeError("[gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:37000")
        return answer

    def write_others() -> OtherSlices:
        write_own({"master.one": torch.full((3,), float(lone.run.progress.step))}, tmp_path, "default", 1)
        return OtherSlices(2, ask)

    checkpoints = Checkpoints(tmp_path, 9, nullcontext, str, SpanLog(tmp_path / "spans.jsonl", "trainer"))
    for step in (1, 2):
        lone.train(make_batch(step))
        published = tmp_path / "run_default" / "broadcast" / f"step_{step}"
        published.mkdir(parents=True)
        (published / "STABLE").touch()
        lone.run.torch.shards = Shards(0, 2, {}, {}, write_others)
        assert checkpoints.begin(lone.run)
        lone.run.torch.shards = None
        if step == 1:
            checkpoints.complete()
    checkpoints.settle()
    with pytest.raises(RuntimeError, match="closed by peer"):
        checkpoints.complete()
    checkpoints.close()
    parent = checkpoints_directory(tmp_path, "default")
    assert [path.name for path in parent.iterdir()] == ["step_1"]
    assert load_file(parent / "step_1" / "state.rank_1.safetensors")["master.one"].tolist() == [1.0] * 3


def test_the_slices_of_a_run_are_asked_for_while_those_of_a_later_one_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The one thread waits for those of the first run, and only whoever waits for the second can ask for them."""
    flushed = {"first": threading.Event(), "second": threading.Event()}
    monkeypatch.setattr(
        checkpoint,
        "take",
        lambda run: Snapshot(
            run.run_id, 1, {}, {}, OtherSlices(2, lambda: [] if flushed[run.run_id].is_set() else [1])
        ),
    )
    monkeypatch.setattr(checkpoint, "write", lambda snapshot, *_: snapshot.others.wait())
    durable: list[str] = []
    checkpoints = Checkpoints(tmp_path, 9, nullcontext, durable.append, SpanLog(tmp_path / "spans.jsonl", "trainer"))
    for run_id in flushed:
        published = tmp_path / f"run_{run_id}" / "broadcast" / "step_1"
        published.mkdir(parents=True)
        (published / "STABLE").touch()
        run: Any = SimpleNamespace(run_id=run_id, torch=SimpleNamespace(intact=True), progress=SimpleNamespace(step=1))
        assert checkpoints.begin(run)
    checkpoints.settle()
    assert not caplog.records
    with monkeypatch.context() as patched:
        patched.setattr("counterpoint.trainer.runs.checkpoints.LATE_SECONDS", 0.0)
        checkpoints.settle()
        checkpoints.settle()
    for run_id, record in zip(flushed, caplog.records, strict=True):
        assert f"step 1 of run {run_id} is not written" in record.message
        assert "the disk of rank 1 is waited for" in record.message
    waiting = threading.Thread(target=checkpoints.complete, args=("second",), daemon=True)
    waiting.start()
    for each in flushed.values():
        each.set()
    waiting.join(DEADLINE_SECONDS)
    assert not waiting.is_alive()
    assert durable == ["second"]
    checkpoints.settle()
    assert durable == ["second", "first"]
    checkpoints.close()


@pytest.mark.parametrize("lacks", ["nothing", "intact weights", "a broadcast", "a new step"])
def test_only_new_weights_that_are_whole_and_published_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    monkeypatch.setattr(checkpoint, "take", lambda run: Snapshot(run.run_id, run.progress.step, {}, {}))
    for directory in (tmp_path / "run_one" / "broadcast", checkpoints_directory(tmp_path, "one")):
        is_there = lacks == "a new step" or (directory.name == "broadcast" and lacks != "a broadcast")
        (directory / "step_2").mkdir(parents=True)
        if is_there:
            (directory / "step_2" / "STABLE").touch()
    run: Any = SimpleNamespace(
        run_id="one", torch=SimpleNamespace(intact=lacks != "intact weights"), progress=SimpleNamespace(step=2)
    )
    written: list[int] = []
    monkeypatch.setattr(checkpoint, "write", lambda snapshot, *_: written.append(snapshot.step))
    spans = SpanLog(tmp_path / "spans.jsonl", "trainer")
    with closing(Checkpoints(tmp_path, 9, nullcontext, lambda run_id: None, spans)) as checkpoints:
        assert checkpoints.begin(run) == (lacks == "nothing")
        assert not checkpoints.begin(run), "it is on its way"
        checkpoints.complete()
    assert written == ([2] if lacks == "nothing" else [])


def killed_write(write: Callable[..., None], deaths: Deaths, *arguments: object) -> None:
    """Counts the operations of the thread alone."""
    with pytest.MonkeyPatch.context() as patched:
        deaths.install(patched)
        write(*arguments)


def test_a_kill_while_one_is_written_leaves_the_last_one_whole(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each file operation of the thread, with the trainer's loop a step ahead."""
    for due in range(100):
        job = tmp_path / str(due)
        write_population(job, dense_directory, checkpoint_interval=1)
        committed = {"winner": 1, "loser": 0, "third": 0}
        deaths = Deaths()
        with life(job, dense_directory, committed, keep_checkpoints=1) as one:
            one.until_step(winner=1)
            former = state_of(one, "winner")
            deaths.due = due
            with monkeypatch.context() as patched:
                patched.setattr(checkpoint, "write", partial(killed_write, checkpoint.write, deaths))
                committed["winner"] = 2
                died = False
                try:
                    one.until_step(winner=2)
                except Death:
                    died = True
            latter = state_of(one, "winner")
        if not died:
            break
        with life(job, dense_directory, committed, keep_checkpoints=1) as again:
            again.turn_until(lambda: again.step_of("winner") >= 1, "the run")
            again.until_step(winner=2)
            assert same(state_of(again, "winner"), latter)
        assert not same(former, latter)
    assert due > 5
