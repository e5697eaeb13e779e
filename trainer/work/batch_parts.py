"""Sends each rank the samples of a batch that it trains, and to all ranks only what every one of them needs.

When a step is opened, all ranks get its outline: the samples' descriptions and lengths, which tokens are trained, and the
advantages, from which `trainer/updates/columns.py` computes over the whole batch. Token ids, log-probabilities, optional columns
and routing, nearly all of the bytes, follow with the first row that has the sample, to that row's rank. On the ranks but the
first the batch is filled in as they arrive; memory that nothing was written to is never allocated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from counterpoint.transport.files.atomic import as_bytes_view
from counterpoint.transport.records import Batch, SampleInfo


def outline(batch: Batch) -> tuple[dict[str, Any], bytes]:
    """Returns what every rank needs of a batch: a header for msgpack, and arrays."""
    header = {
        "run_id": batch.run_id,
        "step": batch.step,
        "samples": [list(dataclasses.astuple(sample)) for sample in batch.samples],
        "columns": list(batch.columns),
        "routed": bool(batch.routed_experts),
        "tokens": len(batch.token_ids_T),
    }
    arrays = (batch.sample_offsets, batch.advantages_T, batch.loss_mask_T)
    return header, b"".join(as_bytes_view(np.ascontiguousarray(array)) for array in arrays)


def unfilled(header: dict[str, Any], arrays: bytes) -> Batch:
    """Returns the batch of an outline, with nothing else in it; `fill` adds samples."""
    samples, tokens = tuple(SampleInfo(*each) for each in header["samples"]), int(header["tokens"])
    offsets = np.frombuffer(arrays, np.int64, len(samples) + 1)
    return Batch(
        header["run_id"],
        header["step"],
        samples,
        token_ids_T=np.zeros(tokens, np.int32),
        loss_mask_T=np.frombuffer(arrays, np.uint8, tokens, offsets.nbytes + 4 * tokens),
        log_probabilities_T=np.zeros(tokens, np.float32),
        advantages_T=np.frombuffer(arrays, np.float32, tokens, offsets.nbytes),
        sample_offsets=offsets,
        routed_experts=cast(Any, [()] * len(samples) if header["routed"] else ()),  # a list, to be filled in
        columns={name: np.zeros(tokens, np.float32) for name in header["columns"]},
    )


def part(batch: Batch, samples: Sequence[int]) -> Batch:
    """Returns a batch of these samples alone."""
    spans = [_span(batch, sample) for sample in samples]

    def joined(column_T: Any) -> Any:
        return np.concatenate([column_T[span] for span in spans])

    return Batch(
        batch.run_id,
        batch.step,
        tuple(batch.samples[sample] for sample in samples),
        joined(batch.token_ids_T),
        joined(batch.loss_mask_T),
        joined(batch.log_probabilities_T),
        joined(batch.advantages_T),
        np.cumsum([0, *(span.stop - span.start for span in spans)], dtype=np.int64),
        tuple(batch.routed_experts[sample] for sample in samples) if batch.routed_experts else (),
        {name: joined(column_T) for name, column_T in batch.columns.items()},
    )


def fill(batch: Batch, samples: Sequence[int], given: Batch) -> None:
    """Writes the samples of `given`, which are these of the batch, into a batch of `unfilled`."""
    for index, sample in enumerate(samples):
        own, theirs = _span(batch, sample), _span(given, index)
        batch.token_ids_T[own] = given.token_ids_T[theirs]
        batch.log_probabilities_T[own] = given.log_probabilities_T[theirs]
        for name, column_T in batch.columns.items():
            column_T[own] = given.columns[name][theirs]
        if batch.routed_experts:
            cast(Any, batch.routed_experts)[sample] = given.routed_experts[index]


def _span(batch: Batch, sample: int) -> slice:
    return slice(int(batch.sample_offsets[sample]), int(batch.sample_offsets[sample + 1]))
