"""Batches for the tests of this package: small ones by hand, arbitrary ones by hypothesis, and how to compare two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies

from counterpoint.transport.records import COLUMNS, OPTIONAL_COLUMNS, Batch, RoutingArray, SampleInfo

NAMES = strategies.text(max_size=20)
TEMPERATURES = strategies.floats(1e-3, 100.0)


def make_batch(
    run_id: str = "default",
    step: int = 1,
    lengths: tuple[int, ...] = (5, 3),
    dtype: type[np.uint8] | type[np.uint16] | None = np.uint8,
    layers: int = 2,
    top_k: int = 2,
) -> Batch:
    """A valid batch of samples of `lengths` tokens; each sample's routing comes in two chunks, or none without a dtype."""
    random = np.random.default_rng(step)
    tokens = sum(lengths)
    mask = random.integers(0, 2, tokens, dtype=np.uint8)
    return Batch(
        run_id=run_id,
        step=step,
        samples=tuple(SampleInfo(f"rollout-{i}", "reverse-text", step - 1, i / 2, 1.0) for i in range(len(lengths))),
        columns={
            "token_ids_T": random.integers(0, 1000, tokens, dtype=np.int32),
            "loss_mask_T": mask,
            "log_probabilities_T": (-random.random(tokens) * mask).astype(np.float32),
            "advantages_T": random.standard_normal(tokens).astype(np.float32),
            "sample_offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        },
        routed_experts=tuple(
            _chunks(random, length - 1, dtype, layers, top_k) if dtype is not None else () for length in lengths
        )
        if dtype is not None
        else (),
    )


def _chunks(
    random: np.random.Generator, rows: int, dtype: type[np.uint8] | type[np.uint16], layers: int, top_k: int
) -> tuple[RoutingArray, ...]:
    shapes = [(part, layers, top_k) for part in (rows // 2, rows - rows // 2)]
    if dtype is np.uint8:
        return tuple(random.integers(0, 256, shape, dtype=np.uint8) for shape in shapes)
    return tuple(random.integers(0, 2**16, shape, dtype=np.uint16) for shape in shapes)


@strategies.composite
def batches(draw: strategies.DrawFn) -> Batch:
    """Any small valid batch, values drawn from a seed and shapes by hypothesis."""
    batch = make_batch(
        run_id=draw(strategies.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,10}", fullmatch=True)),
        step=draw(strategies.integers(1, 2**40)),
        lengths=tuple(draw(strategies.lists(strategies.integers(1, 9), max_size=5))),
        dtype=draw(strategies.sampled_from([None, np.uint8, np.uint16])),
        layers=draw(strategies.integers(1, 3)),
        top_k=draw(strategies.integers(1, 3)),
    )
    return with_changes(
        batch,
        **{
            name: (batch.log_probabilities_T - 1).astype(COLUMNS[name].dtype)
            for name in OPTIONAL_COLUMNS
            if draw(strategies.booleans())
        },
        samples=tuple(
            SampleInfo(
                draw(NAMES), draw(NAMES), info.policy_version, draw(strategies.floats(-1e9, 1e9)), draw(TEMPERATURES)
            )
            for info in batch.samples
        ),
    )


def with_changes(batch: Batch, **given: Any) -> Batch:
    """A copy with other fields, and other columns by their names."""
    columns = batch.columns | {name: given.pop(name) for name in list(given) if name in COLUMNS}
    return replace(batch, **{"columns": columns, **given})


def assert_equal(left: Batch, right: Batch) -> None:
    """Same names, numbers, dtypes and shapes."""
    assert (left.run_id, left.step, left.samples) == (right.run_id, right.step, right.samples)
    assert left.optional == right.optional
    assert [len(chunks) for chunks in left.routed_experts] == [len(chunks) for chunks in right.routed_experts]
    for one, other in zip(left.arrays, right.arrays, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        np.testing.assert_array_equal(one, other)
