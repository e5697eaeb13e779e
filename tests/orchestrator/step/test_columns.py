"""An optional column follows its tokens from the turn to the trainer's row; without one, nothing is as much as a byte longer."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import orjson
import pytest
import torch

from counterpoint.job.replay.consumer import read_every_byte
from counterpoint.orchestrator.rollouts.rollout_file import framed, frames, parse_rollouts, rollout_buffers
from counterpoint.orchestrator.rollouts.trajectories import assemble_batch
from counterpoint.orchestrator.step.advantages import load_advantage
from counterpoint.orchestrator.step.boundary import merge_all
from counterpoint.orchestrator.step.finalize import Finalizer, find_fault
from counterpoint.orchestrator.step.merge_process import _sample, _sample_buffers
from counterpoint.orchestrator.step.records import rollout_record
from counterpoint.run.config import AdvantageConfig
from counterpoint.trainer.packer import ModelLimits, pack
from counterpoint.transport import codec
from counterpoint.transport.arrays import AnyArray, CodecError
from counterpoint.transport.files.atomic import Buffer, as_bytes_view
from counterpoint.transport.records import REQUIRED_COLUMNS, TEACHER_LOG_PROBABILITIES, Batch, Rollout, Turn
from counterpoint.transport.validation import validate
from tests.support.batches import assert_equal, make_batch, with_changes
from tests.support.rollouts import make_rollout, make_turn

LIMIT = 2**20


def with_column(turn: Turn, values: list[float]) -> Turn:
    return replace(turn, columns={TEACHER_LOG_PROBABILITIES: np.asarray(values, np.float32)})


def make_asked(index: int = 0) -> Rollout:
    """A rollout whose first turn the second extends, and whose second leaves its first token untrained."""
    second = with_column(make_turn([1, 2, 3, 4, 9], [5, 6]), [-3.0 - index, -4.0 - index])
    second.leave_untrained(0, 1)
    first = with_column(make_turn([1, 2], [3, 4]), [-1.0 - index, -2.0 - index])
    return make_rollout(0, index, turns=[first, second])


def columned(lengths: tuple[int, ...] = (5, 3), dtype: type[np.uint8] | None = np.uint8) -> Batch:
    batch = make_batch(lengths=lengths, dtype=dtype)
    values = -np.arange(sum(lengths), dtype=np.float32)
    return with_changes(batch, **{TEACHER_LOG_PROBABILITIES: values})


def raw(batch: Batch) -> list[bytes]:
    return [bytes(as_bytes_view(frame)) for frame in codec.encode(batch)]


def test_a_batch_without_columns_is_what_it_was() -> None:
    batch = make_batch()
    frames = raw(batch)
    values = list(msgpack.Unpacker(io.BytesIO(frames[1])))
    assert values[0] == ["default", 1, 2, 9, True]
    arrays: list[AnyArray] = [batch.token_ids_T, batch.loss_mask_T, batch.log_probabilities_T, batch.advantages_T]
    arrays += [batch.sample_offsets, *(chunk for sample in batch.routed_experts for chunk in sample)]
    assert frames[2:] == [array.tobytes() for array in arrays]
    rollout = make_rollout(turns=[make_turn([1], [2])])
    (_, (header, turn)) = list(read_frames(rollout_buffers(rollout)))
    assert set(turn) == {"prompt_ids", "completion_ids", "log_probabilities"}
    assert "columns" not in header


@pytest.mark.parametrize("dtype", [None, np.uint8])
def test_a_column_travels_and_is_kept(dtype: type[np.uint8] | None, tmp_path: Path) -> None:
    batch = columned(dtype=dtype)
    plain = make_batch(dtype=dtype)
    assert batch.nbytes == plain.nbytes + 4 * 8
    codec.write_file(tmp_path / "batch.bin", batch)
    for decoded in (codec.decode(raw(batch), LIMIT), codec.read_file(tmp_path / "batch.bin", LIMIT)):
        assert_equal(decoded, batch)
        assert decoded.optional == [TEACHER_LOG_PROBABILITIES]
        assert read_every_byte(decoded) == read_every_byte(batch) != read_every_byte(plain)


def header_with(*names: object) -> list[bytes]:
    frames = raw(columned(dtype=None))
    first, *rest = msgpack.Unpacker(io.BytesIO(frames[1]))
    return [frames[0], b"".join(map(msgpack.packb, [[*first[:5], *names], *rest])), *frames[2:]]


@pytest.mark.parametrize(
    "frames",
    [
        header_with("values_of_another_kind"),
        header_with(TEACHER_LOG_PROBABILITIES, TEACHER_LOG_PROBABILITIES),
        header_with(["nested"]),
        header_with(7),
        header_with(*["x"] * 4),
    ],
    ids=["unknown", "twice", "nested", "a number", "more than a header holds"],
)
def test_a_name_that_is_no_column_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(CodecError):
        codec.decode(frames, LIMIT)


def test_a_column_without_a_name_and_a_name_without_a_column_are_refused() -> None:
    with pytest.raises(CodecError, match=r"\b0 routing chunks, 1\b"):
        codec.decode(header_with(), LIMIT)
    frames = header_with(TEACHER_LOG_PROBABILITIES)[:-1]
    with pytest.raises(CodecError, match=r"\b6 arrays, 5\b.*\b6\b"):
        codec.decode(frames, LIMIT)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (np.zeros(7, np.float32), "teacher_log_probabilities: 7 values where token_ids_T has 8"),
        (np.zeros(8, np.int32), "teacher_log_probabilities: int32"),
        (np.zeros((8, 1), np.float32), r"teacher_log_probabilities: float32 \[8, 1\]; expected one dimension"),
        (np.full(8, np.nan, np.float32), r"sample 0 \(rollout-0\): teacher_log_probabilities is nan at its token 0"),
        (np.full(8, -np.inf, np.float32), "teacher_log_probabilities is -inf"),
        (
            np.full(8, 0.5, np.float32),
            r"teacher_log_probabilities is 0.5 at its token 0; expected a finite number, 0 or",
        ),
        (np.broadcast_to(np.float32(0), 2**30 + 1), "an array of 4294967300 bytes"),
    ],
)
def test_a_bad_column_is_named(column: np.ndarray, message: str) -> None:
    batch = with_changes(columned(), **{TEACHER_LOG_PROBABILITIES: column})
    with pytest.raises(ValueError, match=message):
        validate(batch)


def test_an_unknown_column_does_not_validate() -> None:
    with pytest.raises(ValueError, match=r"^columns: 'other'.*teacher_log_probabilities"):
        validate(replace(columned(), columns=columned().columns | {"other": np.zeros(8, np.float32)}))


@pytest.mark.parametrize("name", REQUIRED_COLUMNS)
def test_a_batch_without_a_required_column_does_not_validate(name: str) -> None:
    columns = {each: column for each, column in columned().columns.items() if each != name}
    with pytest.raises(ValueError, match=rf"^columns: {name}\b"):
        validate(replace(columned(), columns=columns))


def test_turns_become_a_batch() -> None:
    outcome = Finalizer(load_advantage(AdvantageConfig()), ())([make_asked(0), make_asked(10)], False)
    assert outcome.failed == 0
    batch = assemble_batch("default", 1, merge_all(outcome.rollouts))
    validate(batch)
    assert batch.loss_mask_T.tolist() == [0, 0, 1, 1, 0, 0, 1] * 2
    own = [0, 0, -1, -2, 0, 0, -4]
    assert batch.columns[TEACHER_LOG_PROBABILITIES].tolist() == [*own, *(v and v - 10 for v in own)]


def test_some_samples_with_a_column_are_no_batch() -> None:
    samples = merge_all([make_asked(), make_rollout(0, 1)])
    with pytest.raises(ValueError, match=r"0-1 .*\[\].* 0-0 .*\['teacher_log_prob"):
        assemble_batch("default", 1, samples)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([-1.0], r"turn 1: teacher_log_probabilities has shape \(1,\) and dtype float32 for 2 completion_ids"),
        ([-1.0, np.nan], r"turn 1: teacher_log_probabilities\[1\] is nan; expected a finite number, 0 or less"),
        (None, r"turn 1: it has the columns \[\], turn 0 has \['teacher_log_probabilities'\]"),
    ],
)
def test_a_rollout_with_a_bad_column_fails_alone(values: list[float] | None, message: str) -> None:
    rollout = make_asked()
    second = make_turn([1, 2, 3, 4, 9], [5, 6])
    rollout.turns[1] = second if values is None else with_column(second, values)
    assert_fault(rollout, message)


def assert_fault(rollout: Rollout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        raise ValueError(find_fault(rollout))


def read_frames(buffers: Sequence[Buffer]) -> list[tuple[dict[str, object], dict[str, np.ndarray]]]:
    return list(frames(memoryview(b"".join(as_bytes_view(buffer) for buffer in buffers))))


def test_dumps_and_checkpoints_hold_it() -> None:
    outcome = Finalizer(load_advantage(AdvantageConfig()), ())([make_asked(0), make_asked(10)], False)
    data = b"".join(as_bytes_view(buffer) for rollout in outcome.rollouts for buffer in rollout_buffers(rollout))
    read = parse_rollouts(memoryview(data))
    one, other = (assemble_batch("default", 1, merge_all(rollouts)) for rollouts in (outcome.rollouts, read))
    assert_equal(one, other)
    line = orjson.loads(orjson.dumps(rollout_record(read[0], [])))
    assert [turn[TEACHER_LOG_PROBABILITIES] for turn in line["turns"]] == [-1.5, -3.5]


def test_a_damaged_column_of_a_file_is_named() -> None:
    rollout, (header, arrays), *rest = read_frames(rollout_buffers(make_asked()))
    arrays[TEACHER_LOG_PROBABILITIES] = np.zeros(3, np.float32)
    buffers = [buffer for frame in (rollout, (header, arrays), *rest) for buffer in framed(*frame)]
    with pytest.raises(ValueError, match=r"teacher_log_probabilities has \(3,\) of float32 for 2 "):
        parse_rollouts(memoryview(b"".join(as_bytes_view(buffer) for buffer in buffers)))


def test_the_merge_process_passes_it_on() -> None:
    samples = merge_all([make_asked(), make_asked(10)])
    passed = [_sample(*frame) for sample in samples for frame in read_frames(_sample_buffers(sample))]
    assert_equal(assemble_batch("default", 1, passed), assemble_batch("default", 1, samples))
    assert TEACHER_LOG_PROBABILITIES in passed[0].columns


def test_a_row_of_two_runs_holds_the_column_of_the_one_that_has_it() -> None:
    limits = ModelLimits(vocabulary=1000, max_tokens=64, layers=0, experts=0, top_k=0)
    asked, plain = columned((5, 4), None), make_batch(lengths=(6,), dtype=None)
    micro = pack([(plain, [0]), (asked, [1, 0])], limits, torch.device("cpu"))
    order = [5, 6, 7, 8, 0, 1, 2, 3, 4]
    expected = [0.0] * int(plain.loss_mask_T.sum()) + [-float(t) for t in order if asked.loss_mask_T[t]]
    assert micro.columns_P[TEACHER_LOG_PROBABILITIES].tolist() == expected
    assert pack([(plain, [0])], limits, torch.device("cpu")).columns_P == {}
