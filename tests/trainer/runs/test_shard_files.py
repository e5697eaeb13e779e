"""The state of a sharded run on disk: what some ranks write, any number of ranks reads."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from counterpoint.run.trainer_files import saved_directory
from counterpoint.trainer.runs import shard_files
from counterpoint.trainer.runs.shard_files import file_name, slice_of, write_own
from counterpoint.trainer.taken_over import keep
from tests.trainer.one_process_trainer import Death, Deaths

WEIGHTS = {"one": torch.arange(15.0).view(5, 3), "two": torch.arange(8.0) + 100}
ROWS = {name: len(tensor) for name, tensor in WEIGHTS.items()}


def own_rows(rank: int, ranks: int, parallel: int = 1) -> dict[str, tuple[int, int]]:
    """`parallel` is of "two" alone, whose rows are experts."""
    return {name: slice_of(rows, rank, ranks, parallel if name == "two" else 1) for name, rows in ROWS.items()}


def state(rank: int, ranks: int, parallel: int = 1) -> dict[str, torch.Tensor]:
    """Returns the state of one rank, with the moments of an optimizer."""
    tensors: dict[str, torch.Tensor] = {}
    for name, (first, last) in own_rows(rank, ranks, parallel).items():
        tensors |= {f"master.{name}": WEIGHTS[name][first:last].clone(), f"step.{name}": torch.tensor(7.0)}
    return tensors


def write(directory: Path, ranks: int, parallel: int = 1) -> dict[str, object] | None:
    """A checkpoint by so many ranks; returns its description."""
    checkpoint = directory / "checkpoint"
    checkpoint.mkdir()
    save_file(state(0, ranks, parallel) | {"random.cpu": torch.arange(3)}, checkpoint / file_name(0))
    for rank in range(1, ranks):
        write_own(state(rank, ranks, parallel), directory, "one", rank)
    shard_files.take_over(directory, "one", ranks, checkpoint)
    groups = {"parallel": {"two": parallel}} if parallel > 1 else {}
    return {"ranks": ranks, "rows": ROWS} | groups if ranks > 1 else None


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_any_number_of_ranks_reads_the_rows_that_are_its_own(ranks: int, tmp_path: Path) -> None:
    shards = write(tmp_path, ranks)
    for readers in (1, 2, 3, 4, 8):
        for rank in range(readers):
            own = own_rows(rank, readers) if readers > 1 else None
            found = shard_files.read(tmp_path / "checkpoint", shards, own)
            for key, expected in (state(rank, readers) | {"random.cpu": torch.arange(3)}).items():
                assert torch.equal(found[key], expected), (readers, rank, key)


@pytest.mark.parametrize(("ranks", "parallel"), [(2, 2), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8)])
def test_experts_that_groups_of_ranks_divide_are_read_by_any_others(ranks: int, parallel: int, tmp_path: Path) -> None:
    shards = write(tmp_path, ranks, parallel)
    for readers, reading in ((1, 1), (3, 1), (4, 1), (2, 2), (4, 2), (4, 4), (8, 4)):
        for rank in range(readers):
            own = own_rows(rank, readers, reading) if readers > 1 else None
            found = shard_files.read(tmp_path / "checkpoint", shards, own)
            for key, expected in state(rank, readers, reading).items():
                assert torch.equal(found[key], expected), (readers, reading, rank, key)


def test_a_group_has_all_rows_and_neighbours_have_neighbouring_parts() -> None:
    assert [slice_of(8, rank, 4, 2) for rank in range(4)] == [(0, 2), (4, 6), (2, 4), (6, 8)]
    assert [slice_of(8, rank, 4, 4) for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_the_slices_are_those_of_torch() -> None:
    for rows in range(1, 20):
        for ranks in range(1, 9):
            chunks = list(torch.arange(rows).chunk(ranks))
            chunks += [torch.arange(0)] * (ranks - len(chunks))
            for rank, chunk in enumerate(chunks):
                assert torch.equal(torch.arange(rows)[slice(*slice_of(rows, rank, ranks))], chunk)


def test_files_that_are_not_what_the_description_says_are_refused(tmp_path: Path) -> None:
    shards = write(tmp_path, 2)
    assert shards is not None
    directory = tmp_path / "checkpoint"
    with pytest.raises(ValueError, match="has 3 rows in the file of rank 0; expected 2"):
        shard_files.read(directory, shards | {"rows": ROWS | {"one": 4}}, None)
    for wrong in (0, 3, 4, "2"):
        with pytest.raises(ValueError, match=r"expected a divisor of 2 ranks and 8 rows"):
            shard_files.read(directory, shards | {"parallel": {"two": wrong}}, None)
    with pytest.raises(ValueError, match="written by 0 ranks"):
        shard_files.read(directory, shards | {"ranks": 0}, None)
    with pytest.raises(OSError, match="rank_2"):
        shard_files.read(directory, shards | {"ranks": 3}, None)
    with pytest.raises(ValueError, match="has 5 rows; this model has at least 9"):
        shard_files.read(directory, shards, {"one": (4, 9)})


def test_a_rank_killed_while_it_writes_leaves_no_slice_or_a_whole_one_and_the_next_is_its_own(tmp_path: Path) -> None:
    former, latter = ({"master.one": torch.full((3,), value)} for value in (1.0, 2.0))
    for due in range(100):
        job, deaths = tmp_path / str(due), Deaths()
        staged = shard_files.staged(job, "one", 1)
        write_own(former, job, "one", 1)
        shard_files.take_over(job, "one", 2, job)
        deaths.due = due
        try:
            with pytest.MonkeyPatch.context() as patched:
                deaths.install(patched)
                write_own(latter, job, "one", 1)
        except Death:
            assert not staged.exists() or torch.equal(load_file(staged)["master.one"], latter["master.one"])
        assert torch.equal(load_file(job / file_name(1))["master.one"], former["master.one"]), "that of the checkpoint"
        write_own(latter, job, "one", 1)
        assert torch.equal(load_file(staged)["master.one"], latter["master.one"])
        assert [path.name for path in staged.parent.parent.iterdir()] == ["rank_1"], "nothing is left of the killed one"
        if not deaths.dead:
            break
    assert due > 3


def test_a_checkpoint_that_is_kept_has_the_slices_of_all_ranks(tmp_path: Path) -> None:
    shards = write(tmp_path, 3)
    source = tmp_path / "trainer" / "one" / "checkpoints" / "step_4"
    source.parent.mkdir()
    (tmp_path / "checkpoint").rename(source)
    (source / "state.json").write_text("{}")
    (source / "STABLE").touch()
    keep(tmp_path, "one", 4)
    shutil.rmtree(source)
    kept = saved_directory(tmp_path, "one") / "step_4"
    assert torch.equal(shard_files.read(kept, shards, None)["master.one"], WEIGHTS["one"])
