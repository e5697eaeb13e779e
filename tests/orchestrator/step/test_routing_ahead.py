"""The record that is begun before its batch is known: equal to the batch whatever was added when, or left to the boundary."""

from __future__ import annotations

import errno
import gc
import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from counterpoint.orchestrator.rollouts.trajectories import assemble_batch, merge_turns
from counterpoint.orchestrator.step.boundary import StepBoundary, merge_all
from counterpoint.orchestrator.step.checkpoint import StepCheckpoint
from counterpoint.orchestrator.step.routing_ahead import RoutingAhead
from counterpoint.transport import codec
from counterpoint.transport.arrays import CodecError
from counterpoint.transport.files import direct
from counterpoint.transport.files.atomic import Buffer
from counterpoint.transport.files.direct import append
from counterpoint.transport.records import Batch, Rollout
from perf.chaos.disk import read_batch
from tests.support.batches import assert_equal
from tests.support.rollouts import make_rollout, make_turn

LIMIT = 2**30


def make_groups(count: int) -> list[list[Rollout]]:
    """Finalized groups of three rollouts: one of two turns, one that branches, and one that failed."""
    groups = []
    for number in range(count):
        turns = [make_turn([1, 2], [3], start=0), make_turn([1, 2, 3, 4 + number], [5, 6], start=2)]
        apart = [make_turn([1, 2], [3], start=0), make_turn([7] * (number + 2), [8], start=0)]
        group = [
            make_rollout(number, 0, turns=turns),
            make_rollout(number, 1, turns=apart),
            make_rollout(number, 2, error="it broke", reward=None),
        ]
        for rollout in group:
            merge_turns(rollout)
        groups.append(group)
    return groups


def batch_of(groups: Sequence[Sequence[Rollout]]) -> Batch:
    return assemble_batch("one", 3, merge_all([each for group in groups for each in group if each.error is None]))


def ahead_of(directory: Path, groups: Sequence[Sequence[Rollout]]) -> RoutingAhead:
    ahead = RoutingAhead(directory, 1000)
    for group in groups:
        ahead.add(group)
    return ahead


@given(st.permutations(range(6)), st.integers(0, 6), st.sets(st.integers(0, 5), min_size=1))
@example(list(range(6)), 6, set(range(6)))
def test_a_record_is_the_batch_or_is_left_to_the_boundary(order: list[int], added: int, shipped: set[int]) -> None:
    with TemporaryDirectory() as directory:
        groups, path = make_groups(6), Path(directory) / "batch.bin"
        batch, written = batch_of([groups[number] for number in sorted(shipped)]), order[:added]
        published = ahead_of(Path(directory), [groups[number] for number in written]).publish(path, batch)
        if not set(written) <= shipped:
            assert not published, "it holds what is not trained"
        if set(written) == shipped:
            assert published
        assert os.listdir(directory) == ["batch.bin"] * published
        if published:
            assert_equal(codec.read_file(path, LIMIT), batch)
            assert read_batch(path).rollout_ids == tuple(sample.rollout_id for sample in batch.samples)
            assert path.stat().st_size < sum(len(each) + 8 + 16 for each in map(bytes, codec.encode(batch))) + 32


async def take(directory: Path, groups: list[list[Rollout]], ahead: RoutingAhead) -> Batch:
    rollouts = [rollout for group in groups for rollout in group]
    in_progress = StepBoundary(directory, "one", {"toy": []}).begin(3, rollouts, [], ahead=ahead)
    batch, _ = await in_progress.merge()
    await in_progress.complete(StepCheckpoint(3, {}, {}, {}, [], {}), lambda: None)
    return batch


@pytest.mark.parametrize("past_the_cache", [False, True])
@pytest.mark.parametrize("failed", [False, True])
async def test_the_record_of_a_step_is_begun_by_its_groups_and_never_holds_what_is_not_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: bool, past_the_cache: bool
) -> None:
    if past_the_cache:
        monkeypatch.setattr(direct, "_DIRECT_FROM_BYTES", 0)
    groups, rollouts = make_groups(3), tmp_path / "rollouts"
    ahead = ahead_of(rollouts, groups)
    assert os.listdir(rollouts) == [], "nothing that a killed process would leave"
    if failed:  # as a rollout of another form is at the boundary
        groups[1][0].error = "of another form"
    batch = await take(tmp_path, groups, ahead)
    record = rollouts / "step_3/batch.bin"
    assert record.read_bytes().startswith(codec.INDEXED_MAGIC) is not failed
    assert_equal(codec.read_file(record, LIMIT), batch)
    assert len(batch.samples) == 9 - failed


@pytest.mark.parametrize("written", [0, 1, 3])
async def test_a_disk_that_was_full_meanwhile_costs_nothing_but_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    groups, writes = make_groups(3), []

    def full(descriptor: int, buffers: Sequence[Buffer]) -> None:
        writes.append(descriptor)
        if len(writes) > written:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(descriptor, buffers)

    monkeypatch.setattr("counterpoint.orchestrator.step.routing_ahead.append", full)
    batch = await take(tmp_path, groups, ahead_of(tmp_path / "rollouts", groups))
    assert_equal(codec.read_file(tmp_path / "rollouts/step_3/batch.bin", LIMIT), batch)
    assert len(writes) == written + 1, "it does not try again"


async def test_a_file_system_without_unnamed_files_has_the_record_written_whole_and_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    groups, opened = make_groups(2), os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported", str(path))
        return opened(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    batch = await take(tmp_path, groups, ahead_of(tmp_path / "rollouts", groups))
    assert_equal(codec.read_file(tmp_path / "rollouts/step_3/batch.bin", LIMIT), batch)
    ahead_of(tmp_path / "rollouts", groups)
    assert [str(tmp_path / "rollouts") in record.getMessage() for record in caplog.records] == [True]


def test_what_is_not_trained_is_not_written_ahead(tmp_path: Path) -> None:
    """Else the record would be written once more: filtered rollouts, failed ones, and branches of which no token is trained."""
    (group,) = make_groups(1)
    filtered = make_rollout(0, 3, turns=[make_turn([1, 2], [9], start=0)], filtered_by="zero_advantage")
    untrained = [make_turn([1, 2], [3], start=0), replace(make_turn([5, 6], [7], start=0), untrained=b"\x01")]
    group += [filtered, make_rollout(0, 4, turns=untrained)]
    for rollout in group[3:]:
        merge_turns(rollout)
    kept = [rollout for rollout in group if rollout is not filtered]
    assert len(batch_of([kept]).samples) == 1 + 2 + 1
    assert ahead_of(tmp_path, [group]).publish(tmp_path / "batch.bin", batch_of([kept]))
    assert_equal(codec.read_file(tmp_path / "batch.bin", LIMIT), batch_of([kept]))


def test_what_is_written_stays_alive_until_the_record_is_complete(tmp_path: Path) -> None:
    """Its chunks are known by their `id`, which another one might get."""
    groups = make_groups(2)
    chunks = [weakref.ref(chunk) for sample in batch_of(groups).routed_experts for chunk in sample]
    ahead = ahead_of(tmp_path, groups)
    del groups
    gc.collect()
    assert all(chunk() is not None for chunk in chunks)
    assert not ahead.publish(tmp_path / "batch.bin", batch_of(make_groups(2)))
    gc.collect()
    assert all(chunk() is None for chunk in chunks)


def test_each_group_is_flushed_as_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the boundary flushes little."""
    flushed: list[int] = []
    flush = os.fdatasync

    def noted(file: int) -> None:
        flushed.append(os.fstat(file).st_size)
        flush(file)

    monkeypatch.setattr(os, "fdatasync", noted)
    ahead_of(tmp_path, make_groups(3))
    assert len(flushed) == 3
    assert flushed == sorted(set(flushed))


def test_it_makes_no_directory_of_a_run_that_was_deleted(tmp_path: Path) -> None:
    ahead_of(tmp_path / "run_one" / "rollouts", make_groups(1))
    assert not (tmp_path / "run_one").exists()


def open_files(directory: Path) -> int:
    """The descriptors of files in it, also of unnamed ones."""
    links = map(Path, (f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")))
    return sum(link.is_symlink() and os.readlink(link).startswith(f"{directory}/") for link in links)


def test_it_takes_no_more_than_a_batch_and_lets_the_file_go(tmp_path: Path) -> None:
    groups = make_groups(3)
    ahead = RoutingAhead(tmp_path, 4)
    for group in groups:
        ahead.add(group)
    assert open_files(tmp_path) == 1
    assert ahead.publish(tmp_path / "batch.bin", batch_of(groups[:2])), "the third found no room"
    assert not ahead.publish(tmp_path / "other.bin", batch_of(groups[:2]))
    ahead.add(groups[2])
    assert open_files(tmp_path) == 0
    dropped = ahead_of(tmp_path, groups)
    assert open_files(tmp_path) == 1
    del dropped
    assert open_files(tmp_path) == 0


@given(st.data())
def test_a_damaged_index_raises_the_documented_error(data: st.DataObject) -> None:
    with TemporaryDirectory() as directory:
        groups, path = make_groups(2), Path(directory) / "batch.bin"
        batch = batch_of(groups)
        assert ahead_of(Path(directory), groups).publish(path, batch)
        content = bytearray(path.read_bytes())
        if data.draw(st.booleans()):
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        else:
            index = len(content) - 16 - 16 * len(codec.encode(batch))
            content[data.draw(st.integers(index, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        with pytest.raises(CodecError, match=r"batch\.bin"):
            codec.read_file(path, LIMIT)


@pytest.mark.parametrize(
    "places",
    [
        [(8, 8), (8, 8)],
        [(8, 8), (16, 16)],
        [(8, 8), (2**64 - 8, 16)],
        [(8, 8), (16, 2**64 - 8)],
        [(0, 8), (8, 8)],
        [(8, 0)],
    ],
)
def test_an_index_that_names_anything_but_each_byte_once_is_refused(
    tmp_path: Path, places: list[tuple[int, int]]
) -> None:
    path = tmp_path / "batch.bin"
    for index, expected in (([(8, 8), (16, 0)], [b"12345678", b""]), (places, None)):
        path.write_bytes(b"".join([codec.INDEXED_MAGIC, b"12345678", codec.index_of(index)]))
        if expected is not None:
            assert codec.read_frames(path, LIMIT) == expected
    with pytest.raises(CodecError, match="does not cover"):
        codec.read_frames(path, LIMIT)
