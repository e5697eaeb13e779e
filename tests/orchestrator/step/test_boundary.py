"""The step boundary without a daemon, in a thread and in the merge process; a failure before the commit leaves no step."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from counterpoint.orchestrator.rollouts.dump import DumpHeader, open_dump
from counterpoint.orchestrator.rollouts.token_file import TOKENS_FILE, read_tokens
from counterpoint.orchestrator.rollouts.transcripts import Transcriber
from counterpoint.orchestrator.step.boundary import SMALL_TOKENS, StepBoundary, StepInProgress, merge_all
from counterpoint.orchestrator.step.checkpoint import StepCheckpoint
from counterpoint.orchestrator.step.merge_process import MergeProcess
from counterpoint.transport import codec
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.process.priority import NICENESS
from counterpoint.transport.records import Batch, Rollout, Turn
from tests.support.niceness import own_niceness
from tests.support.polling import until, wait_until
from tests.support.rollouts import make_rollout, make_turn


def make_rollouts() -> list[Rollout]:
    two_turns = [make_turn([1, 2], [3], start=0), make_turn([1, 2, 3, 4], [5, 6], version=1, start=2)]
    return [
        make_rollout(0, 0, turns=two_turns, state={"answer": "yes", "note": "kept, too"}, reward=0.5),
        make_rollout(0, 1, error="it broke", reward=None),
        make_rollout(1, 0, filtered_by="zero_advantage", reward=0.0),
        make_rollout(1, 1, reward=1.0),
    ]


@dataclass
class Outlet:
    """Takes batches, and looks when."""

    run_dir: Path
    offered: list[Batch] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)

    def offer(self, batch: Batch, nbytes: int) -> None:
        assert nbytes == batch.nbytes
        assert batch.step not in published_steps(self.run_dir / "rollouts"), "it waited for the disk"
        self.offered.append(batch)

    def commit(self, step: int) -> None:
        for what in ("rollouts", "checkpoints"):
            assert step in published_steps(self.run_dir / what), "before it was true"
        self.committed.append(step)


async def take(boundary: StepBoundary, rollouts: list[Rollout], outlet: Outlet, step: int = 3) -> dict[str, Any]:
    discarded = [make_rollout(2, 0, filtered_by="repetition", reward=0.1)]
    in_progress = boundary.begin(step, rollouts, discarded)
    outlet.offer(*await in_progress.merge())
    return await in_progress.complete(StepCheckpoint(step, {}, {}, {}, [], {}), lambda: outlet.commit(step))


@pytest.mark.parametrize("chunk_size", [None, 1])
async def test_what_a_step_leaves(tmp_path: Path, chunk_size: int | None) -> None:
    outlet = Outlet(tmp_path)
    header = DumpHeader(run_id="one", step=1, shipped=0, state_columns={"toy": ["answer"]})
    boundary = StepBoundary(tmp_path, "one", {"toy": ["answer"]}, gather_chunk_size=chunk_size, dump=header)
    line = await take(boundary, make_rollouts(), outlet)
    (batch,) = outlet.offered
    assert outlet.committed == [3]
    assert [sample.rollout_id for sample in batch.samples] == ["0-0", "1-1"]
    recorded = codec.read_file(tmp_path / "rollouts/step_3/batch.bin", 1 << 30)
    np.testing.assert_array_equal(recorded.token_ids_T, batch.token_ids_T)
    records = [orjson.loads(row) for row in (tmp_path / "rollouts/step_3/rollouts.jsonl").read_bytes().splitlines()]
    assert [record["rollout_id"] for record in records] == ["0-0", "0-1", "1-0", "1-1", "2-0"]
    assert records[0]["state"] == {"answer": "yes", "note": "kept, too"}
    dump = open_dump(tmp_path / "raw_rollouts/step_3")
    assert (dump.header.step, dump.header.shipped, dump.header.rollouts) == (3, 4, 5)
    assert [rollout.rollout_id for rollout in dump.rollouts()] == ["0-0", "0-1", "1-0", "1-1", "2-0"]
    assert line["reward/mean"] == pytest.approx((0.5 + 0.0 + 1.0 + 0.1) / 4)
    assert (line["rollouts/completed"], line["rollouts/failed"], line["rollouts/filtered"]) == (4, 1, 2)
    assert (line["staleness/max"], line["step"]) == (3, 3)
    assert [orjson.loads(row) for row in (tmp_path / "metrics.jsonl").read_bytes().splitlines()] == [line]
    committed = orjson.loads((tmp_path / "checkpoints/step_3/metrics.json").read_bytes())
    under_way = {"phase/commit", "wall_seconds"}
    assert {name: value for name, value in committed.items() if name not in under_way}.items() <= line.items()
    assert all(committed[name] < line[name] for name in under_way)


@pytest.mark.parametrize(
    ("turn", "lowered"),
    [
        (make_turn([1, 2], [3], start=0), NICENESS),
        (make_turn([1] * SMALL_TOKENS, [3]), NICENESS),
        (make_turn([1, 2], [3]), 0),
    ],
    ids=["routing", "many tokens", "small"],
)
async def test_the_thread_that_records_leaves_a_core_to_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn: Turn, lowered: int
) -> None:
    """What is little is written at the loop's priority: the trainer waits for it."""
    before, found = own_niceness(), []
    write = codec.write_file

    def write_and_look(path: Path, batch: Batch) -> None:
        found.append(own_niceness())
        write(path, batch)

    monkeypatch.setattr(codec, "write_file", write_and_look)
    await take(StepBoundary(tmp_path, "one", {"toy": []}), [make_rollout(turns=[turn], reward=1.0)], Outlet(tmp_path))
    assert found == [min(19, before + lowered)]
    assert own_niceness() == before


async def test_the_trainer_may_begin_before_the_last_phase_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outlet = Outlet(tmp_path)
    monkeypatch.setattr(
        "counterpoint.orchestrator.step.boundary.give_memory_back",
        lambda: wait_until(lambda: outlet.committed == [3], "the commit"),
    )
    await take(StepBoundary(tmp_path, "one", {"toy": []}), make_rollouts(), outlet)


async def test_a_step_that_is_cancelled_while_it_is_recorded_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    write, complete = codec.write_file, StepInProgress._complete

    def write_slowly(path: Path, batch: Batch) -> None:
        writing.set()
        assert go_on.wait(60)
        write(path, batch)

    def complete_noticed(step: StepInProgress, *arguments: Any) -> dict[str, Any]:
        try:
            return complete(step, *arguments)
        finally:
            ended.set()

    monkeypatch.setattr(codec, "write_file", write_slowly)
    monkeypatch.setattr(StepInProgress, "_complete", complete_noticed)
    outlet = Outlet(tmp_path)
    taking = asyncio.create_task(take(StepBoundary(tmp_path, "one", {"toy": []}), make_rollouts(), outlet))
    await until(writing.is_set, "the record")
    taking.cancel()
    await asyncio.wait([taking])
    go_on.set()
    await until(ended.is_set, "the end of the thread")
    assert published_steps(tmp_path / "rollouts") == [3]
    assert published_steps(tmp_path / "checkpoints") == outlet.committed == []


async def test_a_step_with_texts_has_their_tokens_beside_them(tmp_path: Path) -> None:
    transcribe = Transcriber(lambda sequences: ["".join(map(str, ids)) for ids in sequences], 100)
    await take(StepBoundary(tmp_path, "one", {"toy": []}, transcribe=transcribe), make_rollouts(), Outlet(tmp_path))
    for number, rollout in enumerate(make_rollouts()):
        rollout_id, turns = read_tokens(tmp_path / "rollouts/step_3" / TOKENS_FILE, number)
        assert rollout_id == rollout.rollout_id
        assert [turn.token_ids.tolist() for turn in turns] == [turn.completion_ids.tolist() for turn in rollout.turns]
    await take(StepBoundary(tmp_path, "one", {"toy": []}), make_rollouts(), Outlet(tmp_path), 4)
    assert not (tmp_path / "rollouts/step_4" / TOKENS_FILE).exists(), "nor any text"


@pytest.mark.parametrize("keep", [1, 2, 3])
async def test_a_metrics_line_is_on_the_disk_or_in_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    path = tmp_path / "metrics.jsonl"
    on_disk: list[int] = []
    fsync = os.fsync

    def noticed(descriptor: int) -> None:
        fsync(descriptor)
        if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
            on_disk[:] = [orjson.loads(row)["step"] for row in path.read_bytes().splitlines()]

    monkeypatch.setattr(os, "fsync", noticed)
    boundary = StepBoundary(tmp_path, "one", {"toy": []}, keep_checkpoints=keep)
    for step in range(1, 8):
        await take(boundary, make_rollouts(), Outlet(tmp_path), step)
        assert {*on_disk, *published_steps(tmp_path / "checkpoints")} == set(range(1, step + 1))


async def test_each_file_of_a_step_is_flushed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flush waits for the disk's journal."""
    flushed: list[str] = []
    fsync = os.fsync

    def noticed(descriptor: int) -> None:
        fsync(descriptor)
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "fsync", noticed)
    transcribe = Transcriber(lambda sequences: ["" for _ in sequences], 100)
    await take(StepBoundary(tmp_path, "one", {"toy": []}, transcribe=transcribe), make_rollouts(), Outlet(tmp_path))
    step = [file.name for kind in ("rollouts", "checkpoints") for file in (tmp_path / kind / "step_3").iterdir()]
    assert {"batch.bin", "rollouts.jsonl", TOKENS_FILE, "waiting-0.bin"} <= {*step}
    assert {name: flushed.count(name) for name in step} == {name: step.count(name) for name in step}


async def test_a_full_disk_leaves_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, batch: Batch) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(codec, "write_file", full)
    outlet = Outlet(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        await take(StepBoundary(tmp_path, "one", {"toy": []}), make_rollouts(), outlet)
    assert outlet.committed == []
    assert published_steps(tmp_path / "rollouts") == published_steps(tmp_path / "checkpoints") == []


async def test_a_batch_that_the_trainer_would_refuse_leaves_no_step(tmp_path: Path) -> None:
    rollouts = [*make_rollouts(), make_rollout(4, 0, advantage=float("nan"))]
    outlet = Outlet(tmp_path)
    with pytest.raises(ValueError, match=r"sample 2 \(4-0\): advantages_T is nan"):
        await take(StepBoundary(tmp_path, "one", {"toy": []}), rollouts, outlet)
    assert outlet.offered == []
    assert published_steps(tmp_path / "rollouts") == published_steps(tmp_path / "checkpoints") == []


@pytest.mark.slow
async def test_the_merge_process_gives_the_same(tmp_path: Path) -> None:
    cold = replace(make_turn([1], [2, 3]), temperature=0.5)
    rollouts = [make_rollouts()[0], make_rollout(3, 0, turns=[cold])]
    of_turns = np.array([0.1], np.float32)
    rollouts[1].turn_rewards, rollouts[1].turn_advantages = of_turns, -of_turns
    async with MergeProcess() as merge:
        for _ in range(2):
            for one, other in zip(await merge(rollouts), merge_all(rollouts), strict=True):
                assert (one.rollout_id, one.policy_version, one.reward, one.temperature) == (
                    other.rollout_id, other.policy_version, other.reward, other.temperature,
                )  # fmt: skip
                for name in ("token_ids_T", "loss_mask_T", "log_probabilities_T", "advantages_T"):
                    np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
                assert one.turn_rewards == other.turn_rewards
                assert bool(one.routed_experts) == bool(other.routed_experts)
                if one.routed_experts:
                    np.testing.assert_array_equal(
                        np.concatenate(one.routed_experts), np.concatenate(other.routed_experts)
                    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_to_all_leaves_the_merge_process_to_the_daemon(number: signal.Signals) -> None:
    async with MergeProcess() as merge:
        merge._process.signal(number)
        assert len(await merge(make_rollouts()[:1])) == 1


@pytest.mark.slow
async def test_a_merge_process_that_dies_is_named() -> None:
    async with MergeProcess() as merge:
        merge._process.kill()
        with pytest.raises(RuntimeError, match="died with exit code 137"):
            await merge(make_rollouts()[:1])
