"""Sends each rank the samples of a batch that it trains, and to all ranks only the parts that every one of them needs.

When a step is opened, all ranks get its outline: the samples' descriptions and lengths, which tokens are trained, the
advantages, and for a value head the rewards of turns. `counterpoint/trainer/updates/columns.py` computes from these over the
whole batch. Token ids, log-probabilities, other optional columns and routing, nearly all of the bytes, follow with the first row
that has the sample, to that row's rank. The other ranks than the first fill the batch in as parts arrive. Memory without a write
is never allocated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, cast

import numpy as np

from counterpoint.transport.files.atomic import as_bytes_view
from counterpoint.transport.records import COLUMNS, REWARDS, Batch, SampleInfo

_OUTLINED = ("sample_offsets", "advantages_T", "loss_mask_T", REWARDS)
"""The columns that every rank needs whole, if the batch has them."""


def outline(batch: Batch) -> tuple[dict[str, Any], bytes]:
    """Returns a batch's outline for every rank: a header for msgpack, and arrays."""
    header = {
        "run_id": batch.run_id,
        "step": batch.step,
        "samples": [list(dataclasses.astuple(sample)) for sample in batch.samples],
        "columns": list(batch.columns),
        "routed": bool(batch.routed_experts),
        "tokens": len(batch.token_ids_T),
    }
    return header, b"".join(
        as_bytes_view(np.ascontiguousarray(batch.columns[name])) for name in _outlined(batch.columns)
    )


def _outlined(names: Collection[str]) -> list[str]:
    return [name for name in _OUTLINED if name in names]


def unfilled(header: dict[str, Any], arrays: bytes) -> Batch:
    """Returns the batch of an outline, with nothing else in it. `fill` adds samples."""
    samples, tokens = tuple(SampleInfo(*each) for each in header["samples"]), int(header["tokens"])
    columns, start = {name: np.zeros(tokens, COLUMNS[name].dtype) for name in header["columns"]}, 0
    for name in _outlined(columns):
        count = tokens if COLUMNS[name].of_tokens else len(samples) + 1
        columns[name] = np.frombuffer(arrays, COLUMNS[name].dtype, count, start)
        start += columns[name].nbytes
    routed = cast(Any, [()] * len(samples) if header["routed"] else ())  # a list, to be filled in
    return Batch(header["run_id"], header["step"], samples, columns, routed)


def part(batch: Batch, samples: Sequence[int]) -> Batch:
    """Returns a batch of these samples alone."""
    spans = [_span(batch, sample) for sample in samples]
    columns = {
        name: np.concatenate([column_T[span] for span in spans])
        for name, column_T in batch.columns.items()
        if COLUMNS[name].of_tokens
    }
    columns["sample_offsets"] = np.cumsum([0, *(span.stop - span.start for span in spans)], dtype=np.int64)
    return Batch(
        batch.run_id,
        batch.step,
        tuple(batch.samples[sample] for sample in samples),
        columns,
        tuple(batch.routed_experts[sample] for sample in samples) if batch.routed_experts else (),
    )


def fill(batch: Batch, samples: Sequence[int], given: Batch) -> None:
    """Writes the samples of `given`, which are these of the batch, into a batch of `unfilled`."""
    for index, sample in enumerate(samples):
        own, theirs = _span(batch, sample), _span(given, index)
        for name in batch.columns.keys() - {*_OUTLINED}:
            batch.columns[name][own] = given.columns[name][theirs]
        if batch.routed_experts:
            cast(Any, batch.routed_experts)[sample] = given.routed_experts[index]


def _span(batch: Batch, sample: int) -> slice:
    return slice(int(batch.sample_offsets[sample]), int(batch.sample_offsets[sample + 1]))
