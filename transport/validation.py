"""Checks that a batch is valid: its columns agree with each other and hold numbers that can be trained on.

Both ends call `validate`: the orchestrator before the batch becomes its durable record, the trainer on every batch it
receives. Every check is one vectorised pass; the sample at fault is searched only in a column that is known to be bad.
"""

from __future__ import annotations

import math
import re

import numpy as np

from counterpoint.transport.config import IDENTIFIER_PATTERN
from counterpoint.transport.records import COLUMNS, OPTIONAL_COLUMNS, REQUIRED_COLUMNS, Batch, RoutingArray

MAX_ARRAY_BYTES = 4 * 2**30
"""Most bytes of one column or one routing chunk. Each travels as one frame, and a receiver's wire allocates a frame as soon as
its length has arrived. The token ids of a step of 25 GB with routing take 0.3 GB, the routing of a turn of a million tokens 0.4
to 1.5 GB."""

MAX_NAME_LENGTH = 256
"""Most characters of a rollout's id and of an environment's name."""


def validate(batch: Batch, *, whole_routing: bool = True) -> None:
    """Raises `ValueError`, naming sample and field, for a batch that `records.Batch` does not allow.

    Without `whole_routing`, as in an item, the last tokens of a sample may be without routing, or all.
    """
    if not re.fullmatch(IDENTIFIER_PATTERN, batch.run_id):
        raise ValueError(f"run_id: {batch.run_id[:80]!r} does not match {IDENTIFIER_PATTERN}")
    if not 1 <= batch.step < 2**62:
        raise ValueError(f"step: {batch.step} is not a step; they count from 1")
    _check_names(batch)
    _check_sizes(batch)
    _check_columns(batch)
    _check_offsets(batch)
    _check_samples(batch)
    _check_values(batch)
    _check_routing(batch, whole_routing)


def _check_names(batch: Batch) -> None:
    if unknown := [name for name in batch.columns if name not in COLUMNS]:
        raise ValueError(f"columns: {unknown[0]!r:.80} is no column; expected names of {', '.join(OPTIONAL_COLUMNS)}")
    if missing := [name for name in REQUIRED_COLUMNS if name not in batch.columns]:
        raise ValueError(f"columns: {missing[0]} is missing; every batch has {', '.join(REQUIRED_COLUMNS)}")


def _check_sizes(batch: Batch) -> None:
    largest = max(array.nbytes for array in batch.arrays)
    if largest > MAX_ARRAY_BYTES:
        raise ValueError(
            f"an array of {largest} bytes; one column, or the routing of one turn, has at most {MAX_ARRAY_BYTES}"
        )


def _check_columns(batch: Batch) -> None:
    for name, array in batch.columns.items():
        dtype = COLUMNS[name].dtype
        if array.dtype != dtype or array.ndim != 1:
            raise ValueError(f"{name}: {array.dtype} {list(array.shape)}; expected one dimension of {np.dtype(dtype)}")
    tokens = len(batch.token_ids_T)
    for name, array in batch.columns.items():
        if COLUMNS[name].of_tokens and len(array) != tokens:
            raise ValueError(f"{name}: {len(array)} values where token_ids_T has {tokens}")


def _check_offsets(batch: Batch) -> None:
    offsets, tokens = batch.sample_offsets, len(batch.token_ids_T)
    if len(offsets) != len(batch.samples) + 1:
        raise ValueError(f"sample_offsets: {len(offsets)} values for {len(batch.samples)} samples; expected one more")
    if offsets[0] != 0 or offsets[-1] != tokens:
        raise ValueError(f"sample_offsets: from {offsets[0]} to {offsets[-1]}; expected from 0 to {tokens} tokens")
    falling = np.flatnonzero(offsets[1:] <= offsets[:-1])
    if len(falling):
        index = int(falling[0])
        raise ValueError(
            f"sample {index}: sample_offsets go from {offsets[index]} to {offsets[index + 1]}; a sample has at least one token"
        )


def _check_samples(batch: Batch) -> None:
    for index, sample in enumerate(batch.samples):
        if not math.isfinite(sample.reward):
            raise ValueError(
                f"sample {index} ({sample.rollout_id}): reward is {sample.reward}; expected a finite number"
            )
        if not 0 < sample.temperature < math.inf:
            raise ValueError(
                f"sample {index} ({sample.rollout_id}): temperature is {sample.temperature}; expected a positive, finite number"
            )
        if not 0 <= sample.policy_version < 2**62:
            raise ValueError(f"sample {index} ({sample.rollout_id}): policy_version is {sample.policy_version}")
        if max(len(sample.rollout_id), len(sample.environment)) > MAX_NAME_LENGTH:
            raise ValueError(f"sample {index}: a rollout_id or environment of more than {MAX_NAME_LENGTH} characters")


def _check_values(batch: Batch) -> None:
    for name, values_T in batch.columns.items():
        column = COLUMNS[name]
        if not column.of_tokens or not (bad_T := column.bad(values_T)).any():
            continue
        position = int(bad_T.argmax())
        index = int(np.searchsorted(batch.sample_offsets, position, side="right")) - 1
        raise ValueError(
            f"sample {index} ({batch.samples[index].rollout_id}): {name} is {values_T[position]} at its token "
            f"{position - batch.sample_offsets[index]}; expected {column.expected} ({int(bad_T.sum())} such in the batch)"
        )


def _check_routing(batch: Batch, whole: bool) -> None:
    if not batch.routed_experts:
        return
    if len(batch.routed_experts) != len(batch.samples):
        raise ValueError(f"routed_experts: for {len(batch.routed_experts)} samples of {len(batch.samples)}")
    lengths = np.diff(batch.sample_offsets).tolist()
    for index, (chunks, length) in enumerate(zip(batch.routed_experts, lengths, strict=True)):
        where = f"sample {index} ({batch.samples[index].rollout_id}): routed_experts"
        rows = sum(_rows(chunk, chunks[0], where) for chunk in chunks)
        if rows != length - 1 and (whole or rows > length - 1):
            raise ValueError(
                f"{where} have {rows} rows for {length} tokens; expected {'' if whole else 'up to '}{length - 1}"
            )


def _rows(chunk: RoutingArray, first: RoutingArray, where: str) -> int:
    if chunk.dtype not in (np.uint8, np.uint16) or chunk.ndim != 3:
        raise ValueError(
            f"{where}: {chunk.dtype} {list(chunk.shape)}; expected uint8 or uint16 [tokens, layers, top_k]"
        )
    if chunk.dtype != first.dtype or chunk.shape[1:] != first.shape[1:]:
        raise ValueError(
            f"{where}: a chunk of {chunk.dtype} {list(chunk.shape)} beside one of {first.dtype} {list(first.shape)}; "
            "the chunks of a sample agree in dtype, layers and top_k"
        )
    return len(chunk)
