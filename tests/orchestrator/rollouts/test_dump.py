"""Dumps: what is written is read back without a copy, and what is not whole is named, never believed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from counterpoint.orchestrator.rollouts.dump import DumpError, DumpHeader, open_dump, write_dump
from counterpoint.orchestrator.rollouts.rollout_file import framed
from counterpoint.run.config import AdvantageConfig, GibberishFilter, ZeroAdvantageFilter
from counterpoint.transport.files.atomic import as_bytes_view
from counterpoint.transport.records import Rollout
from tests.orchestrator.rollouts.test_rollout_file import assert_same
from tests.support.rollouts import make_rollout, make_turn

HEADER = DumpHeader(
    run_id="one",
    step=3,
    shipped=1,
    advantage=AdvantageConfig(length_penalty=0.5),
    filters=[GibberishFilter(log_probability_below=-8.0, share_above=0.3), ZeroAdvantageFilter()],
    gather_chunk_size=4,
    state_columns={"toy": ["answer"]},
    group_scoring=["toy"],
)


def make_rollouts() -> list[Rollout]:
    two_turns = [make_turn([1, 2], [3], start=0), make_turn([1, 2, 3, 4], [5, 6], version=1, start=2)]
    return [
        make_rollout(0, 0, turns=two_turns, state={"answer": "yes"}),
        make_rollout(1, 0, turns=[], error="it broke"),
    ]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_dump(tmp_path / "raw_rollouts/step_3", HEADER, make_rollouts())
    return tmp_path / "raw_rollouts/step_3"


def edit(**changes: Any) -> Callable[[Path], None]:
    """Rewrites keys of the header; None removes one."""

    def change(directory: Path) -> None:
        path = directory / "header.json"
        values = orjson.loads(path.read_bytes()) | changes
        path.write_bytes(orjson.dumps({key: value for key, value in values.items() if value is not None}))

    return change


def replace_bulk(data: bytes) -> Callable[[Path], None]:
    """Other bytes in the bulk file, which the header vouches for."""

    def change(directory: Path) -> None:
        (directory / "rollouts.bin").write_bytes(data)
        edit(files={"rollouts.bin": len(data)})(directory)

    return change


def frame(header: dict[str, Any], **arrays: np.ndarray[Any, Any]) -> bytes:
    return b"".join(bytes(as_bytes_view(buffer)) for buffer in framed(header, arrays))


def test_round_trip(directory: Path) -> None:
    dump = open_dump(directory)
    size = (directory / "rollouts.bin").stat().st_size
    counts = {"rollouts": 2, "turns": 2, "files": {"rollouts.bin": size}}
    assert dump.header == HEADER.model_copy(update=counts)
    assert dump.nbytes == size
    dump.populate()
    for written, read in zip(make_rollouts(), dump.rollouts(), strict=True):
        assert_same(written, read)


def test_arrays_are_read_only_views_of_the_file(directory: Path) -> None:
    dump = open_dump(directory)
    (first, _), (again, _) = dump.rollouts(), dump.rollouts()
    turn = first.turns[1]
    assert turn.routed_experts is not None
    for array in (turn.prompt_ids, turn.completion_ids, turn.log_probabilities, turn.routed_experts):
        assert not array.flags.writeable
        assert array.ctypes.data % 8 == 0
    assert np.shares_memory(turn.prompt_ids, again.turns[1].prompt_ids)
    assert first is not again
    del dump, first, again
    assert turn.prompt_ids.tolist() == [1, 2, 3, 4], "the map lives as long as an array of it"


def test_an_older_kernel_brings_the_pages_in_all_the_same(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.orchestrator.rollouts.dump._MADV_POPULATE_READ", 12345)
    open_dump(directory).populate()


def test_a_few_rollouts_are_held_at_a_time(tmp_path: Path) -> None:
    alive: list[int] = []

    class Counted(Rollout):
        def __del__(self) -> None:
            alive.pop()

    def rollouts() -> Iterator[Rollout]:
        for index in range(100):
            alive.append(index)
            assert len(alive) <= 20
            yield Counted(f"{index}", 0, "toy", 0)

    header = write_dump(tmp_path / "dump", HEADER, rollouts())
    assert header.rollouts == open_dump(tmp_path / "dump").header.rollouts == 100


def test_a_dump_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def rollouts() -> Iterator[Rollout]:
        yield make_rollout()
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_dump(tmp_path / "dump", HEADER, rollouts())
    with pytest.raises(ValueError, match=r"\b0 rollouts.* 1\b"):
        write_dump(tmp_path / "dump", HEADER, [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda directory: (directory / "STABLE").unlink(), "is not a published dump: STABLE is missing"),
        (lambda directory: (directory / "header.json").unlink(), r"header\.json is missing"),
        (
            lambda directory: (directory / "rollouts.bin").unlink(),
            r"rollouts\.bin is missing; header\.json says that it",
        ),
        (lambda directory: (directory / "header.json").write_bytes(b'{"format": '), r"header\.json is damaged"),
        (lambda directory: (directory / "header.json").write_bytes(b"[]"), "does not describe a dump"),
        (edit(format="something else"), "does not describe a dump; expected format = 'counterpoint raw rollouts'"),
        (edit(version=2), "the dump has version 2; this program reads version 1"),
        (edit(version=None), "the dump has version None"),
        (edit(step=None), "header.json: step: Field required"),
        (edit(step=0), "step: Input should be greater than or equal to 1; found '0'"),
        (edit(run_id="../.."), "run_id: "),
        (edit(surprise=1), "header.json: surprise: Extra inputs are not permitted"),
        (edit(shipped=3), "rollouts = 2, shipped = 3"),
        (edit(rollouts=0, shipped=0), "rollouts = 0"),
        (edit(files={"../../etc/passwd": 1}), "files names ../../etc/passwd; version 1 has rollouts.bin"),
        (edit(files={}), "files names nothing"),
        (edit(files={"rollouts.bin": 2**60}), r"rollouts\.bin has \d+ bytes; header\.json says 1152921504606846976"),
        (edit(files={"rollouts.bin": -1}), r"header\.json says -1"),
        (replace_bulk(b""), r"rollouts\.bin has 0 bytes"),
    ],
)
def test_what_is_not_a_whole_dump_is_refused_when_it_is_opened(
    directory: Path, change: Callable[[Path], None], said: str
) -> None:
    change(directory)
    with pytest.raises(DumpError, match=said) as refusal:
        open_dump(directory)
    assert str(directory) in str(refusal.value)


ROLLOUT = {
    "rollout_id": "0", "group_id": 0, "environment": "toy", "example_index": 0, "turns": 0,
    "reward": 1.0, "error": None, "advantage": 0.0, "filtered_by": None,
}  # fmt: skip
JSON = {name: np.frombuffer(b"{}", dtype=np.uint8) for name in ("metrics", "state")}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (edit(rollouts=3), r"rollouts\.bin holds 2 rollouts of 2 turns; header\.json says 3 of 2"),
        (edit(turns=10**12), "says 2 of 1000000000000"),
        (edit(state_columns={"other": []}), "holds rollouts of toy; state_columns of header.json has only other"),
        (replace_bulk(b"abc"), "the file ends within a length"),
        (replace_bulk(b"\xff" * 64), "claims 18446744073709551615 bytes"),
        (replace_bulk(frame(ROLLOUT | {"turns": 2**40}, **JSON)), "rollout 0 is damaged"),
        (replace_bulk(frame(ROLLOUT | {"surprise": 1}, **JSON)), "unexpected keyword argument 'surprise'"),
        (replace_bulk(frame(ROLLOUT | {"group_id": "x"}, **JSON)), "Rollout.group_id is 'x'; expected int"),
        (replace_bulk(frame(ROLLOUT | {"turns": 1}, **JSON) + frame({"policy_version": 0})), "missing 4 required"),
        (replace_bulk(frame(ROLLOUT, **(JSON | {"state": JSON["state"][:1]}))), "rollout 0 is damaged"),
    ],
)
def test_damage_in_the_bulk_is_found_when_it_is_read(
    directory: Path, change: Callable[[Path], None], said: str
) -> None:
    change(directory)
    with pytest.raises(DumpError, match=said) as refusal:
        open_dump(directory).rollouts()
    assert str(directory / "rollouts.bin") in str(refusal.value)


def test_a_header_that_is_too_large_is_not_read(directory: Path) -> None:
    with (directory / "header.json").open("r+b") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(DumpError, match="1099511627776 bytes; expected at most"):
        open_dump(directory)


def test_a_cut_bulk_file_is_refused_at_every_length(directory: Path) -> None:
    path = directory / "rollouts.bin"
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(DumpError, match=r"it was truncated or changed"):
            open_dump(directory)


def test_the_directory_of_all_steps_names_them(tmp_path: Path) -> None:
    for step in (2, 10):
        write_dump(tmp_path / f"raw_rollouts/step_{step}", HEADER, make_rollouts())
    for parent in (tmp_path, tmp_path / "raw_rollouts"):
        with pytest.raises(DumpError, match=r"\b2 to 10\b.*/step_10"):
            open_dump(parent)
    with pytest.raises(DumpError, match="does not exist"):
        open_dump(tmp_path / "raw_rollouts/step_3")
    write_dump(tmp_path / "job/run_one/raw_rollouts/step_4", HEADER, make_rollouts())
    with pytest.raises(DumpError, match=r"run_one/raw_rollouts .*\bstep 4\b.*/step_4"):
        open_dump(tmp_path / "job")
