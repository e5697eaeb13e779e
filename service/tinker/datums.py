"""From the SDK's data to a contribution, and from what came of it to the SDK's output. Pure.

A datum has `N` tokens and, for each place, what is predicted there: targets are shifted already. As a sample it has one more
token, the last target, and each token but the first is predicted: in the place of token `i + 1`, target `i`. Losses are sums over
tokens, as the SDK defines them, so the divisor is 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from counterpoint.run.items import Objective
from counterpoint.service.tinker.proto import FLOAT32, INT32, INT64, MESSAGES
from counterpoint.transport.messages import Answered
from counterpoint.transport.records import LOG_PROBABILITY_ROUNDING, Batch, Float32Array, SampleInfo

_DTYPES: dict[int, type[np.generic]] = {FLOAT32: np.float32, INT64: np.int64, INT32: np.int32}

_INPUTS = {
    "cross_entropy": ("target_tokens", "weights"),
    "importance_sampling": ("target_tokens", "logprobs", "advantages"),
    "ppo": ("target_tokens", "logprobs", "advantages"),
}
"""The inputs of each loss."""

_UNBOUNDED = 1e30


class BadRequest(ValueError):
    """A request that cannot be carried out; the message is for its client."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """What is asked of a run for one request."""

    batch: Batch
    objective: Objective
    lengths: list[int]
    """The places of each datum."""
    inputs: dict[str, Float32Array]
    """The inputs of the loss, `[sum of lengths]` each."""
    loss: str
    bounds: tuple[float, float]
    forward_only: bool


def contribution_of(request: Any, run_id: str, longest: int, vocabulary: int | None) -> Contribution:
    """Returns the contribution of a `ForwardBackwardRequest`. Samples have at most `longest` tokens. Raises `BadRequest`."""
    loss = request.loss_fn
    if loss not in _INPUTS:
        raise BadRequest(f"loss_fn = {loss!r} is not served; expected one of {', '.join(_INPUTS)}")
    if not request.data:
        raise BadRequest("no data: expected at least one datum")
    bounds = _bounds(request)
    tokens, targets, lengths = [], [], []
    inputs: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in _INPUTS[loss][1:]}
    for index, datum in enumerate(request.data):
        where = f"datum {index}"
        ids = _tokens(datum, where)
        if len(ids) + 1 > longest:
            raise BadRequest(f"{where} has {len(ids)} tokens; at most {longest - 1} can be trained")
        given = {entry.key: entry.value for entry in datum.loss_fn_inputs}
        wanted = _column(given, "target_tokens", len(ids), where)
        for part in (ids, wanted):
            if part.min() < 0 or (vocabulary is not None and part.max() >= vocabulary):
                raise BadRequest(
                    f"{where}: its tokens are from {part.min()} to {part.max()}; the model has {vocabulary}"
                )
        for name, column in inputs.items():
            ones = name == "weights" and name not in given
            column.append(np.ones(len(ids), np.float32) if ones else _column(given, name, len(ids), where))
        if unknown := sorted(set(given) - set(_INPUTS[loss])):
            raise BadRequest(f"{where}: loss_fn_inputs has {unknown[0]!r}; {loss} takes {', '.join(_INPUTS[loss])}")
        tokens.append(np.append(ids, wanted[-1]))
        targets.append(np.append(ids[:1], wanted))
        lengths.append(len(ids))
    joined = {name: np.concatenate(columns).astype(np.float32) for name, columns in inputs.items()}
    _check(joined)
    return Contribution(
        _batch(run_id, np.concatenate(tokens).astype(np.int32), lengths, joined),
        _objective(loss, bounds, np.concatenate(targets).astype(np.int32), lengths, joined, request.forward_only),
        lengths, joined, loss, bounds, request.forward_only,
    )  # fmt: skip


def _bounds(request: Any) -> tuple[float, float]:
    """Returns the bounds of the ratio. Raises `BadRequest` for a configuration that the loss has not."""
    given: dict[str, Any] = {entry.key: entry.value for entry in request.loss_fn_config}
    given |= {entry.key: entry.value.text or entry.value.number for entry in request.loss_fn_config_v2}
    known = ("clip_low_threshold", "clip_high_threshold") if request.loss_fn == "ppo" else ()
    if unknown := sorted(set(given) - set(known)):
        raise BadRequest(f"loss_fn_config: {request.loss_fn} takes {', '.join(known) or 'none'}, not {unknown[0]!r}")
    if request.loss_fn != "ppo":
        return 0.0, _UNBOUNDED
    low, high = given.get("clip_low_threshold", 0.8), given.get("clip_high_threshold", 1.2)
    if not (isinstance(low, float) and isinstance(high, float) and 0 <= low <= 1 <= high < math.inf):
        raise BadRequest(f"loss_fn_config: bounds of the ratio are {low} and {high}; expected 0 <= low <= 1 <= high")
    return low, high


def _tokens(datum: Any, where: str) -> npt.NDArray[np.int64]:
    parts = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise BadRequest(f"{where}: model_input has a chunk that is no text; only text is served")
        parts.append(_array(chunk.encoded_text.tokens, np.int32, f"{where}: model_input"))
    if not sum(map(len, parts)):
        raise BadRequest(f"{where}: model_input has no token")
    joined: npt.NDArray[np.int64] = np.concatenate(parts).astype(np.int64)
    return joined


def _column(given: Mapping[str, Any], name: str, length: int, where: str) -> npt.NDArray[Any]:
    if name not in given:
        raise BadRequest(f"{where}: loss_fn_inputs lacks {name}")
    tensor = given[name]
    if tensor.HasField("sparse_csr") or len(tensor.shape) > 1:
        raise BadRequest(f"{where}: {name} has the shape {list(tensor.shape)}; only one target a place is served")
    if tensor.dtype not in _DTYPES:
        raise BadRequest(f"{where}: {name} has the dtype {tensor.dtype}; expected one of {sorted(_DTYPES)}")
    values = _array(tensor.dense, _DTYPES[tensor.dtype], f"{where}: {name}")
    if len(values) != length:
        raise BadRequest(f"{where}: {name} has {len(values)} values for {length} tokens")
    if name == "target_tokens" and tensor.dtype == FLOAT32:
        raise BadRequest(f"{where}: {name} are floats; expected whole numbers")
    return values


def _array(data: bytes, dtype: type[np.generic], where: str) -> npt.NDArray[Any]:
    if len(data) % np.dtype(dtype).itemsize:
        raise BadRequest(f"{where} has {len(data)} bytes, which are no {np.dtype(dtype).name}s")
    return np.frombuffer(data, dtype)


def _check(inputs: Mapping[str, Float32Array]) -> None:
    for name, values in inputs.items():
        if not np.isfinite(values).all():
            raise BadRequest(f"{name}: not all values are finite")
        if name == "logprobs" and (values > LOG_PROBABILITY_ROUNDING).any():
            raise BadRequest(f"{name}: the largest is {values.max()}; log-probabilities are 0 or less")


def _spread(values: npt.NDArray[Any], lengths: list[int]) -> npt.NDArray[Any]:
    """Returns the values of places `[sum of N]` as those of tokens `[sum of N + 1]`: 0 for each first one."""
    starts = np.cumsum([0, *lengths[:-1]])
    return np.insert(values, starts, 0)


def _batch(
    run_id: str, token_ids: npt.NDArray[np.int32], lengths: list[int], inputs: Mapping[str, Float32Array]
) -> Batch:
    zeros = np.zeros(sum(lengths), np.float32)
    columns = {
        "token_ids_T": token_ids,
        "loss_mask_T": _spread(np.ones(sum(lengths), np.uint8), lengths),
        "log_probabilities_T": _spread(inputs.get("logprobs", zeros), lengths),
        "advantages_T": _spread(inputs.get("advantages", zeros), lengths),
        "sample_offsets": np.cumsum([0, *(length + 1 for length in lengths)]).astype(np.int64),
    }
    samples = tuple(SampleInfo(f"datum-{index}", "client", 0, 0.0, 1.0) for index in range(len(lengths)))
    return Batch(run_id, 1, samples, columns, ())


def _objective(
    loss: str,
    bounds: tuple[float, float],
    targets: npt.NDArray[np.int32],
    lengths: list[int],
    inputs: Mapping[str, Float32Array],
    forward_only: bool,
) -> Objective:
    """Without a backward pass, each token's weight is 0: its gradient is, too."""
    low, high = bounds
    table = (
        {"kind": "sft"}
        if loss == "cross_entropy"
        else {"kind": "ppo", "ratio_to": "inference", "clip_low": 1 - low, "clip_high": high - 1}
    )
    weights = inputs.get("weights")
    if forward_only:
        weights = np.zeros(sum(lengths), np.float32)
    return Objective(
        loss=table,
        divisor=1.0,
        weights=b"" if weights is None else _spread(weights, lengths).tobytes(),
        targets=targets.tobytes(),
        returns=True,
    )


def output_of(contribution: Contribution, answered: Answered) -> bytes:
    """Returns the `ForwardBackwardOutput` of what came of a contribution."""
    lengths = contribution.lengths
    starts = np.cumsum([0, *(length + 1 for length in lengths[:-1])])
    logprobs = np.delete(answered.columns["log_probabilities"], starts).astype(np.float32)
    output = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(lengths))
    field = record.fields.add(key="logprobs")
    field.value.data, field.value.dtype = logprobs.tobytes(), FLOAT32
    field.value.offsets = (4 * np.cumsum([0, *lengths])).astype(np.int64).tobytes()
    output.metrics.add(key="loss:sum", value=loss_of(contribution, logprobs))
    encoded: bytes = output.SerializeToString()
    return encoded


def loss_of(contribution: Contribution, logprobs: Float32Array) -> float:
    """Returns the sum of the loss over all places, in float64, from their log-probabilities `[sum of lengths]`."""
    new, inputs = logprobs.astype(np.float64), {k: v.astype(np.float64) for k, v in contribution.inputs.items()}
    if contribution.loss == "cross_entropy":
        return float(-(new * inputs["weights"]).sum())
    ratio, advantages = np.exp(new - inputs["logprobs"]), inputs["advantages"]
    low, high = contribution.bounds
    return float(-np.minimum(ratio * advantages, ratio.clip(low, high) * advantages).sum())
