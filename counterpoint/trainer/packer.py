"""Checks batches, and packs samples that share a row into the tensors of a micro-batch.

`counterpoint/trainer/fair_share.py` decides whose samples share a row. There is no padding, a sample is never split, and samples
do not attend to each other (`counterpoint/trainer/model/attention.py`). Where the model allows it, a prompt that samples of a
batch begin with is in the row once (`counterpoint/trainer/model/shared_prompts.py`): a group's rollouts have one prompt, and it
is often most of their tokens. Shape suffixes as in `transport/records.py`, and `P` for the trained tokens, each predicted from
the position before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from counterpoint.trainer.model.shared_prompts import FAMILY_TOKENS, Families, Family
from counterpoint.trainer.model.without_waiting import on_device
from counterpoint.transport.records import COLUMNS, TOKEN_COLUMNS, Batch, RoutingArray


class InvalidBatch(ValueError):
    """A batch that must not be trained; the message names the sample, the value, and what was expected."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of the model that a batch has to fit."""

    vocabulary: int
    max_tokens: int
    """The tokens of one sample, which is never split."""
    layers: int
    """The layers of a routing record; 0 when routing is not replayed."""
    experts: int
    top_k: int
    shares_prompts: bool = False
    """Whether samples may share the tokens of their prompt in a row. Recorded routing is of each sample, and prevents it."""


@dataclass(frozen=True, slots=True)
class Part:
    """The samples of one batch in a row, side by side."""

    batch: Batch
    samples: list[int]
    """Indices into the batch, in the order of the row."""
    sample_lengths: list[int]
    predictions: int
    """How many of the row's trained tokens are in these samples."""
    families: Families | None = None
    """The samples by their prompt, in the order of the row, where they share it."""

    @property
    def tokens(self) -> int:
        """Tokens in the row, trained or not."""
        if self.families is not None:
            return sum(family.tokens for family in self.families)
        return sum(self.sample_lengths)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed row, on the device. All index tensors are int64."""

    parts: list[Part]
    """The parts in the order of the row. The trained tokens `P` are in the order of the samples."""
    sample_lengths: list[int]
    """The lengths of whole samples, also where they share a prompt."""
    families: Families | None
    """The families of all parts, where samples share prompts."""
    token_ids_T: Tensor
    position_ids_T: Tensor
    predicting_P: Tensor
    """Position in the row whose next token is trained."""
    targets_P: Tensor
    inference_log_probabilities_P: Tensor
    advantages_P: Tensor
    sample_P: Tensor
    """The token's sample, counted from 0 within its batch's part of the row."""
    columns_P: dict[str, Tensor]
    """The optional columns that a batch of the row has, by name; 0 for the tokens of a batch without it."""
    environments_P: Tensor
    """Index into the sorted names of the environments of the token's batch."""
    temperatures_P: Tensor | float
    """float32: the temperature that the token was sampled at, by which its logits are divided. 1.0 where that is all of them."""
    routed_experts_TLK: Tensor | None
    has_record_T: Tensor


def check(batch: Batch, limits: ModelLimits) -> None:
    """Raises `InvalidBatch` unless every sample of the batch fits the model; `transport` has checked its form."""
    offsets = batch.sample_offsets
    lengths = np.diff(offsets)
    if (longest := int(lengths.max(initial=0))) > limits.max_tokens:
        sample = int(lengths.argmax())
        raise InvalidBatch(
            f"sample {sample} ({batch.samples[sample].rollout_id}) has {longest} tokens, more than the "
            f"{limits.max_tokens} of a row; raise the trainer's max_tokens, or lower max_model_len of inference"
        )
    if (outside := np.flatnonzero((batch.token_ids_T < 0) | (batch.token_ids_T >= limits.vocabulary))).size:
        position = int(outside[0])
        sample = int(np.searchsorted(offsets, position, side="right")) - 1
        raise InvalidBatch(
            f"sample {sample} ({batch.samples[sample].rollout_id}), token {position - int(offsets[sample])}: id "
            f"{batch.token_ids_T[position]} is outside the model's vocabulary of {limits.vocabulary}"
        )
    first_tokens = offsets[:-1][lengths > 0]
    if (trained_first := np.flatnonzero(batch.loss_mask_T[first_tokens])).size:
        sample = int(np.flatnonzero(lengths > 0)[trained_first[0]])
        raise InvalidBatch(
            f"sample {sample} ({batch.samples[sample].rollout_id}): its first token is marked as trained, "
            "but nothing comes before it that could predict it"
        )
    if limits.layers:
        for sample, chunks in enumerate(batch.routed_experts):
            _check_routing(sample, batch.samples[sample].rollout_id, chunks, limits)


def _check_routing(sample: int, rollout_id: str, chunks: Sequence[RoutingArray], limits: ModelLimits) -> None:
    expected = (limits.layers, limits.top_k)
    for chunk in chunks:
        if chunk.shape[1:] != expected:
            raise InvalidBatch(
                f"sample {sample} ({rollout_id}): routed experts of {list(chunk.shape[1:])} [layers, top_k] where the model "
                f"has {list(expected)}; inference serves another model than the trainer trains"
            )
        if chunk.size and (highest := int(chunk.max())) >= limits.experts:
            raise InvalidBatch(
                f"sample {sample} ({rollout_id}): routed to expert {highest} of a model with {limits.experts} experts"
            )


def trained_tokens(batch: Batch) -> dict[int, int]:
    """Returns how many trained tokens each sample has, ascending, without those that have none and so no gradient."""
    trained_before = np.concatenate(([0], np.cumsum(batch.loss_mask_T, dtype=np.int64)))
    counts_S = np.diff(trained_before[batch.sample_offsets])
    return {int(sample): int(counts_S[sample]) for sample in np.flatnonzero(counts_S)}


def environment_names(batch: Batch) -> list[str]:
    """Returns the environments of the batch, sorted, which `MicroBatch.environments_P` indexes."""
    return sorted({sample.environment for sample in batch.samples})


def pack(choices: Sequence[tuple[Batch, Sequence[int]]], limits: ModelLimits, device: torch.device) -> MicroBatch:
    """Packs the chosen samples of checked batches into a row on `device`."""
    optional = sorted({name for batch, _ in choices for name in batch.of_loss})
    columns = [_columns(batch, samples, optional) for batch, samples in choices]
    parts = [part for part, _ in columns]
    joined = {name: np.concatenate([own[name] for _, own in columns]) for name in columns[0][1]}
    trained = np.flatnonzero(joined["loss_mask_T"])
    temperatures = joined["temperatures_T"][trained]
    routed_experts, has_record = _routing(parts, limits)
    families: Families | None = None
    kept = place = np.arange(len(joined["loss_mask_T"]))
    if limits.shares_prompts and routed_experts is None:
        grouped = [_share_prompts(number, part, own) for number, (part, own) in enumerate(columns)]
        found = tuple(family for part, _ in grouped for family in part.families or ())
        if any(len(family.rests) > 1 for family in found):
            families, parts = found, [part for part, _ in grouped]
            kept, place = _joined_places([places for _, places in grouped])

    to_device = partial(on_device, device=device)

    return MicroBatch(
        parts=parts,
        sample_lengths=[length for part in parts for length in part.sample_lengths],
        families=families,
        token_ids_T=to_device(joined["token_ids_T"][kept]),
        position_ids_T=to_device(joined["position_ids_T"][kept]),
        predicting_P=to_device(place[trained - 1]),
        targets_P=to_device(joined["token_ids_T"][trained]),
        inference_log_probabilities_P=to_device(joined["log_probabilities_T"][trained]),
        advantages_P=to_device(joined["advantages_T"][trained]),
        sample_P=to_device(joined["sample_T"][trained]),
        columns_P={name: to_device(joined[name][trained]) for name in optional},
        environments_P=to_device(joined["environments_T"][trained]),
        temperatures_P=to_device(temperatures) if (temperatures != 1).any() else 1.0,
        routed_experts_TLK=None if routed_experts is None else to_device(routed_experts),
        has_record_T=to_device(has_record[kept]),
    )


def _share_prompts(number: int, part: Part, columns: dict[str, npt.NDArray[Any]]) -> tuple[Part, npt.NDArray[np.int64]]:
    """Groups samples of part `number` of a row that begin with equal prompts.

    A prompt ends before the first trained token, or, where the first that can be is trained already, before the first with an
    advantage: a Tinker client has answers to all tokens of its samples. Returns the part with its families, and the place in the
    row of each token of its samples, `[T]`: tokens that samples share have one place.
    """
    starts = np.concatenate(([0], np.cumsum(part.sample_lengths)))
    token_ids_T, mask_T, has_advantage_T = columns["token_ids_T"], columns["loss_mask_T"], columns["advantages_T"] != 0
    groups: dict[bytes, list[tuple[int, int, int]]] = {}
    for start, stop in pairwise(starts.tolist()):
        prompt = int(mask_T[start:stop].argmax())
        if prompt == 1:
            prompt = max(1, int(has_advantage_T[start:stop].argmax()))
        groups.setdefault(token_ids_T[start : start + prompt].tobytes(), []).append((start, prompt, stop))
    place = np.empty(int(starts[-1]), dtype=np.int64)
    families: list[Family] = []
    first = 0
    for samples in (family for group in groups.values() for family in _divided(group)):
        rest = first + samples[0][1]
        for start, prompt, stop in samples:
            place[start : start + prompt] = np.arange(first, first + prompt)
            place[start + prompt : stop] = np.arange(rest, rest := rest + stop - start - prompt)
        families.append(Family(samples[0][1], tuple(stop - start - prompt for start, prompt, stop in samples), number))
        first = rest
    return replace(part, families=tuple(families)), place


def _divided(group: Sequence[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Yields samples `(start, prompt, stop)` with one prompt in pieces of at most `FAMILY_TOKENS`, or of one sample."""
    piece: list[tuple[int, int, int]] = []
    tokens = 0
    for start, prompt, stop in group:
        if piece and tokens + stop - start - prompt > FAMILY_TOKENS:
            yield piece
            piece = []
        tokens = stop - start if not piece else tokens + stop - start - prompt
        piece.append((start, prompt, stop))
    yield piece


def _joined_places(places: Sequence[npt.NDArray[np.int64]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns which tokens of the parts are in the row, in its order, and the place in the row of each token."""
    sizes = [int(place.max()) + 1 for place in places]
    place = np.concatenate([own + first for own, first in zip(places, accumulate(sizes, initial=0), strict=False)])
    kept = np.empty(sum(sizes), dtype=np.int64)
    kept[place] = np.arange(len(place))
    return kept, place


def _columns(batch: Batch, samples: Sequence[int], optional: Sequence[str]) -> tuple[Part, dict[str, npt.NDArray[Any]]]:
    """Returns the columns of `samples` of a batch, all their tokens in order; zeros for an optional one that it lacks."""
    spans = [slice(int(batch.sample_offsets[index]), int(batch.sample_offsets[index + 1])) for index in samples]
    lengths = [span.stop - span.start for span in spans]
    names = environment_names(batch)
    environments_S = np.array([names.index(batch.samples[index].environment) for index in samples])
    temperatures_S = np.array([batch.samples[index].temperature for index in samples], dtype=np.float32)
    columns = {
        "position_ids_T": np.concatenate([np.arange(length) for length in lengths]),
        "sample_T": np.repeat(np.arange(len(samples)), lengths),
        "environments_T": np.repeat(environments_S, lengths),
        "temperatures_T": np.repeat(temperatures_S, lengths),
    }
    for name in (*TOKEN_COLUMNS, *optional):
        column_T = batch.columns.get(name)
        missing_T = np.zeros(sum(lengths), COLUMNS[name].dtype)
        columns[name] = missing_T if column_T is None else np.concatenate([column_T[span] for span in spans])
    columns["token_ids_T"] = columns["token_ids_T"].astype(np.int64)
    return Part(batch, list(samples), lengths, int(columns["loss_mask_T"].sum())), columns


def _routing(parts: Sequence[Part], limits: ModelLimits) -> tuple[npt.NDArray[Any] | None, npt.NDArray[np.bool_]]:
    """Returns the routing records `[T, layers, top_k]` of a row, and which tokens have one, bool `[T]`.

    The tokens with a record are the first of each sample, as many as its routing has rows.
    """
    has_record_T = np.zeros(sum(part.tokens for part in parts), dtype=np.bool_)
    if not limits.layers or not any(any(part.batch.routed_experts) for part in parts):
        return None, has_record_T
    # torch indexes with signed integers; int16 holds every expert count that uint16 routing has in practice, checked above.
    dtype = np.uint8 if limits.experts <= 256 else np.int16 if limits.experts <= 2**15 else np.int32
    rows = np.zeros((len(has_record_T), limits.layers, limits.top_k), dtype=dtype)
    start = 0
    for part in parts:
        for index, length in zip(part.samples, part.sample_lengths, strict=True):
            position = start
            for chunk in part.batch.routed_experts[index] if part.batch.routed_experts else ():
                rows[position : position + len(chunk)] = chunk
                position += len(chunk)
            has_record_T[start:position] = True
            start += length
    return rows, has_record_T
