"""From the SDK's data to a contribution, and from its answer to the SDK's output. Pure.

A datum has `N` tokens and, for each place, a target: targets are shifted already. As a sample it has one more token, the last
target, and each token but the first is predicted: in the place of token `i + 1`, target `i`. For example, tokens `[5, 6]` with
targets `[6, 7]` become the sample `[5, 6, 7]`. Losses are sums over tokens, as the SDK defines them, so the divisor is 1.

Source of the losses: tinker-docs.thinkingmachines.ai/tinker/losses. The default bounds of `gspo` are its paper's (Zheng et al.,
arXiv:2507.18071).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from counterpoint.run.items import Given, Objective
from counterpoint.run.loss_graph import read_graph
from counterpoint.service.tinker.proto import FLOAT32, INT32, INT64, MESSAGES
from counterpoint.service.tinker.refusals import BadRequest
from counterpoint.transport.messages import Answered
from counterpoint.transport.records import LOG_PROBABILITY_ROUNDING, Batch, Float32Array, SampleInfo

_DTYPES: dict[int, type[np.generic]] = {FLOAT32: np.float32, INT64: np.int64, INT32: np.int32}

_SAMPLED = ("target_tokens", "logprobs", "advantages")
_INPUTS = {
    "cross_entropy": ("target_tokens", "weights"),
    "importance_sampling": _SAMPLED,
    "ppo": _SAMPLED,
    "cispo": _SAMPLED,
    "dro": _SAMPLED,
    "gspo": (*_SAMPLED, "sequence_ratio_mask"),
}
"""The inputs of each loss."""

_BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_CONFIG: dict[str, dict[str, float]] = {
    "ppo": _BOUNDS,
    "cispo": _BOUNDS,
    "gspo": {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
    "dro": {"beta": math.nan},
}
"""The possible keys of `loss_fn_config`, with their defaults, or NaN without one. Bounds are those of the ratio."""

_UNKNOWN = {
    "stable_reinforce": ": what it computes is not published. Take importance_sampling, ppo, cispo or gspo, such as by the flag "
    "loss_fn of a recipe"
}

CUSTOM = "custom"
"""The loss that a client has traced."""

_UNBOUNDED = 1e30

MOST_TARGETS = 256
"""Targets that a place may have."""

MOST_NAMED = 16
"""The number of a datum's named samples that are examined."""

MOST_SPARSE = 2**25
"""Numbers of all sparse inputs of a request, zeros included: a few bytes could stand for any number of these."""


@dataclass(frozen=True, slots=True)
class DatumBatch:
    """The item of a run for one request."""

    batch: Batch
    objective: Objective
    lengths: list[int]
    """The places of each datum."""
    targets: tuple[int, ...]
    """The number of targets of each place, as a shape: `()` or `(K,)`."""
    sequences: list[list[str]]
    """The ids of the samples that each datum names as the source of its tokens, the last ones first."""


def tokens_of(request: Any) -> int:
    """Returns the number of tokens that a valid `ForwardBackwardRequest` trains, by the sizes of its fields alone."""
    size = np.dtype(np.int32).itemsize
    return sum(len(chunk.encoded_text.tokens) // size for datum in request.data for chunk in datum.model_input)


@dataclass(frozen=True, slots=True)
class Datum:
    """One datum of a client, with the columns of a loss. It has `N` places."""

    ids_N: npt.NDArray[np.int64]
    targets: npt.NDArray[Any]
    """`[N]`, or `[N, K]` for `K` targets a place."""
    inputs: dict[str, npt.NDArray[Any]]
    """The loss's other inputs, a row a place."""
    sequences: list[str]
    """The ids of the samples of its tokens, the last ones first."""

    @property
    def length(self) -> int:
        """The number of its places."""
        return len(self.ids_N)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the data of one request."""

    loss: str
    ranks: Mapping[str, int]
    """The ranks of the inputs of a traced loss, `logprobs` first, or empty for another loss."""
    longest: int
    vocabulary: int | None

    def read(self, given: Any, where: str, first: Datum | None) -> Datum:
        """Returns a datum that can be joined with the `first` of its request. Raises `BadRequest`."""
        ids = _tokens(given, where)
        if len(ids) + 1 > self.longest:
            raise BadRequest(f"{where} has {len(ids)} tokens; at most {self.longest - 1} can be trained")
        fields = {entry.key: entry.value for entry in given.loss_fn_inputs}
        targets = _column(fields, "target_tokens", len(ids), where)
        self._check_targets(targets, where, first)
        for part in (ids, targets):
            if part.min() < 0 or (self.vocabulary is not None and part.max() >= self.vocabulary):
                raise BadRequest(
                    f"{where}: its tokens are from {part.min()} to {part.max()}; the model has {self.vocabulary}"
                )
        inputs = self._traced(fields, len(ids), where, first) if self.ranks else self._inputs(fields, targets, where)
        return Datum(ids, targets, inputs, _sequences(given))

    def _check_targets(self, targets: npt.NDArray[Any], where: str, first: Datum | None) -> None:
        shape = targets.shape[1:] if first is None else first.targets.shape[1:]
        if targets.shape[1:] != shape or (shape and self.loss not in ("cross_entropy", CUSTOM)):
            raise BadRequest(
                f"{where}: target_tokens has the shape {list(targets.shape)}; several targets a place are for cross_entropy and "
                "custom losses, and as many for each datum of a request"
            )
        if self.ranks and targets.ndim != self.ranks["logprobs"]:
            raise BadRequest(
                f"{where}: target_tokens has the rank {targets.ndim}, logprobs of the loss {self.ranks['logprobs']}"
            )

    def _inputs(self, fields: Mapping[str, Any], targets: npt.NDArray[Any], where: str) -> dict[str, npt.NDArray[Any]]:
        found, (_, *names) = dict[str, npt.NDArray[Any]](), _INPUTS[self.loss]
        for name in names:
            ones = name == "weights" and name not in fields
            found[name] = np.ones(targets.shape, np.float32) if ones else _column(fields, name, len(targets), where)
            if found[name].shape != targets.shape:
                raise BadRequest(
                    f"{where}: {name} has the shape {list(found[name].shape)}; target_tokens {list(targets.shape)}"
                )
        if self.loss == "gspo" and not found["sequence_ratio_mask"].any():
            raise BadRequest(f"{where}: sequence_ratio_mask marks no place")
        if unknown := sorted(set(fields) - {*_INPUTS[self.loss]}):
            raise BadRequest(
                f"{where}: loss_fn_inputs has {unknown[0]!r}; {self.loss} takes {', '.join(_INPUTS[self.loss])}"
            )
        return found

    def _traced(
        self, fields: Mapping[str, Any], length: int, where: str, first: Datum | None
    ) -> dict[str, npt.NDArray[Any]]:
        found, (_, *names) = dict[str, npt.NDArray[Any]](), self.ranks
        for name in names:
            found[name] = _loss_input(fields, name, self.ranks[name], length, where)
            like = found[name] if first is None else first.inputs[name]
            if found[name].shape[1:] != like.shape[1:] or found[name].dtype != like.dtype:
                raise BadRequest(f"{where}: {name} has another shape or dtype than in datum 0")
        return found


def contribution_of(request: Any, run_id: str, longest: int, vocabulary: int | None, graph: bytes = b"") -> DatumBatch:
    """Returns the contribution of a `ForwardBackwardRequest`. Samples have at most `longest` tokens.

    `graph` is that of a traced loss, which `read_graph` takes. Raises `BadRequest`.
    """
    loss, traced = request.loss_fn, read_graph(graph) if graph else None
    if loss not in _INPUTS and traced is None:
        raise BadRequest(
            f"loss_fn = {loss[:80]!r} is not served{_UNKNOWN.get(loss, '')}; expected one of {', '.join(_INPUTS)}"
        )
    if not request.data:
        raise BadRequest("no data: expected at least one datum")
    _check_sparse(request.data, longest)
    table = {"kind": "sft"} if traced else _table(loss, _config(request))
    ranks = {each.name: each.rank for each in traced.inputs} if traced else {}
    reader, data = _Reader(loss, ranks, longest, vocabulary), list[Datum]()
    for index, given in enumerate(request.data):
        data.append(reader.read(given, f"datum {index}", data[0] if data else None))
    return _joined(data, run_id, table, graph, forward_only=request.forward_only)


def _joined(data: list[Datum], run_id: str, table: dict[str, Any], graph: bytes, *, forward_only: bool) -> DatumBatch:
    """Returns the data as the rows of one batch. `graph` is that of a traced loss. Raises `BadRequest`."""
    lengths = [each.length for each in data]
    inputs = {name: np.concatenate([each.inputs[name] for each in data]) for name in data[0].inputs}
    _check(inputs, sampled=not graph)
    columns = {} if graph else {name: values.astype(np.float32) for name, values in inputs.items()}
    given = {name: _given(values, lengths) for name, values in inputs.items()} if graph else {}
    if (mask := columns.get("sequence_ratio_mask")) is not None:
        given = {"ratio_mask": _given(mask, lengths)}
    weights = columns.get("weights")
    objective = Objective(
        loss=table,
        divisor=1.0,
        weights=b"" if weights is None else _spread(weights, lengths).tobytes(),
        targets=np.concatenate([part for each in data for part in (each.targets[:1], each.targets)])
        .astype(np.int32)
        .tobytes(),
        graph=graph,
        inputs=given,
        returns=True,
        forward_only=forward_only,
    )
    tokens = np.concatenate([part for each in data for part in (each.ids_N, each.targets[-1:].flat[:1])]).astype(
        np.int32
    )
    batch = _batch(run_id, tokens, lengths, columns)
    return DatumBatch(batch, objective, lengths, data[0].targets.shape[1:], [each.sequences for each in data])


def _check_sparse(data: Any, longest: int) -> None:
    """Raises `BadRequest` if the sparse inputs stand for too many numbers. Those of a wrong shape are refused one by one."""
    tensors = (entry.value for datum in data for entry in datum.loss_fn_inputs)
    matrices = (each.shape for each in tensors if each.HasField("sparse_csr") and len(each.shape) == 2)
    numbers = sum(n * k for n, k in matrices if 0 < n < longest and 0 < k <= MOST_TARGETS)
    if numbers > MOST_SPARSE:
        raise BadRequest(f"the sparse inputs have {numbers} numbers; at most {MOST_SPARSE}: send fewer data at once")


def _sequences(datum: Any) -> list[str]:
    """Returns the ids of the samples that a datum names, the last ones first: these have most of its tokens."""
    names = [span.sampled_tokens.sequence_id for span in datum.model_input_spans[-2 * MOST_NAMED :]]
    return [name for name in reversed(names) if name][:MOST_NAMED]


def _config(request: Any) -> dict[str, float]:
    """Returns the loss's configuration. Raises `BadRequest` for unknown keys and impossible values."""
    given: dict[str, Any] = {entry.key: entry.value for entry in request.loss_fn_config}
    given |= {entry.key: entry.value.text or entry.value.number for entry in request.loss_fn_config_v2}
    known = _CONFIG.get(request.loss_fn, {})
    if unknown := sorted(set(given) - set(known)):
        raise BadRequest(f"loss_fn_config: {request.loss_fn} takes {', '.join(known) or 'none'}, not {unknown[0]!r}")
    found = known | given
    if wrong := [name for name, value in found.items() if not (isinstance(value, float) and 0 <= value < math.inf)]:
        raise BadRequest(
            f"loss_fn_config: {wrong[0]} = {given.get(wrong[0], 'not given')!r:.80}; expected a number, at least 0"
        )
    return found


def _table(loss: str, config: Mapping[str, float]) -> dict[str, Any]:
    """Returns the keys of `[training.loss]` for a loss. Raises `BadRequest` for bounds without a meaning."""
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 1 + _UNBOUNDED)
    if not (low < high if loss == "cispo" else low <= 1 <= high):
        raise BadRequest(f"loss_fn_config: bounds of the ratio are {low} and {high}; expected low <= 1 <= high")
    clipped = {"ratio_to": "inference", "clip_low": 1 - low, "clip_high": high - 1}
    if loss == "cross_entropy":
        return {"kind": "sft"}
    if loss == "cispo":
        return {"kind": "cispo", "ratio_clip_low": low, "ratio_clip": high}
    if loss == "dro":
        return {"kind": "dro", "proximity": config["beta"]}
    if loss == "gspo":
        return {"kind": "gspo", "ratio_level": "sequence_mean_token", "normalisation": "token", **clipped}
    return {"kind": "ppo", **clipped}


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
    """Returns an input, `[N]` or `[N, K]`, with 0 for numbers that a sparse one does not list."""
    if name not in given:
        raise BadRequest(f"{where}: loss_fn_inputs lacks {name}")
    tensor, what = given[name], f"{where}: {name}"
    if tensor.dtype not in _DTYPES:
        raise BadRequest(f"{what} has the dtype {tensor.dtype}; expected one of {sorted(_DTYPES)}")
    if name == "target_tokens" and tensor.dtype == FLOAT32:
        raise BadRequest(f"{what} are floats; expected whole numbers")
    dtype, shape = _DTYPES[tensor.dtype], list(tensor.shape)
    if len(shape) > 2 or (len(shape) == 2 and not (shape[0] == length and 1 <= shape[1] <= MOST_TARGETS)):
        raise BadRequest(f"{what} has the shape {shape}; expected [{length}] or [{length}, K], K up to {MOST_TARGETS}")
    if tensor.HasField("sparse_csr"):
        values = _dense(tensor.sparse_csr, dtype, shape, what)
    else:
        values = _array(tensor.dense, dtype, what)
        if len(shape) == 2 and len(values) == shape[0] * shape[1]:
            values = values.reshape(shape)
    if len(values) != length or values.ndim != max(1, len(shape)):
        raise BadRequest(f"{what} has {values.size} values, shape {shape}, for {length} tokens")
    return values


def _loss_input(given: Mapping[str, Any], name: str, rank: int, length: int, where: str) -> npt.NDArray[Any]:
    """Returns an input of a traced loss from a datum, a row a place. A scalar is repeated for each place."""
    tensor = given.get(name)
    shape = [] if tensor is None else list(tensor.shape)
    if tensor is None or rank or tensor.dtype not in _DTYPES:
        values = _column(given, name, length, where)
    else:
        values = _array(tensor.dense, _DTYPES[tensor.dtype], f"{where}: {name}")
        values = values.repeat(length) if len(values) == 1 and not shape else values[:, None, None]
    if values.ndim != max(1, rank):
        raise BadRequest(f"{where}: {name} has the shape {shape}; the loss reads rank {rank}")
    return values.astype(np.float32 if values.dtype == np.float32 else np.int64)


def _given(values: npt.NDArray[Any], lengths: list[int]) -> Given:
    return Given(_spread(values, lengths).tobytes(), "float32" if values.dtype == np.float32 else "int64")


def _dense(csr: Any, dtype: type[np.generic], shape: list[int], what: str) -> npt.NDArray[Any]:
    """Returns compressed rows (`torch.sparse_csr_tensor`) as a dense array."""
    values = _array(csr.values, dtype, what)
    rows, columns = (_array(each, np.int64, f"{what}: its indices") for each in (csr.crow_indices, csr.col_indices))
    counts = np.diff(rows)
    if (
        len(shape) != 2
        or len(rows) != shape[0] + 1
        or rows[0] != 0
        or rows[-1] != len(values)
        or len(columns) != len(values)
        or (counts < 0).any()
        or ((columns < 0) | (columns >= shape[1])).any()
    ):
        raise BadRequest(f"{what}: its compressed rows do not fit the shape {shape} and {len(values)} values")
    found = np.zeros(shape, dtype)
    found[np.repeat(np.arange(shape[0]), counts), columns] = values
    return found


def _array(data: bytes, dtype: type[np.generic], where: str) -> npt.NDArray[Any]:
    if len(data) % np.dtype(dtype).itemsize:
        raise BadRequest(f"{where} has {len(data)} bytes, which are no {np.dtype(dtype).name}s")
    return np.frombuffer(data, dtype)


def _check(inputs: Mapping[str, npt.NDArray[Any]], *, sampled: bool) -> None:
    for name, values in inputs.items():
        if not np.isfinite(values).all():
            raise BadRequest(f"{name}: not all values are finite")
        if sampled and name == "logprobs" and (values > LOG_PROBABILITY_ROUNDING).any():
            raise BadRequest(f"{name}: the largest is {values.max()}; log-probabilities are 0 or less")


def _spread(values: npt.NDArray[Any], lengths: list[int]) -> npt.NDArray[Any]:
    """Returns the values of places `[sum of N, ...]` as those of tokens `[sum of N + 1, ...]`, with 0 for each first one."""
    starts = np.cumsum([0, *lengths[:-1]])
    return np.insert(values, starts, 0, axis=0)


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


def output_of(contribution: DatumBatch, answered: Answered, metrics: Mapping[str, float]) -> bytes:
    """Returns the `ForwardBackwardOutput` of an answered contribution, with further metrics."""
    lengths, shape = contribution.lengths, contribution.targets
    starts = np.cumsum([0, *(length + 1 for length in lengths[:-1])])
    column = answered.columns["log_probabilities"]
    logprobs = np.delete(column.reshape(-1, *shape), starts, axis=0).astype(np.float32)
    output = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(lengths))
    field = record.fields.add(key="logprobs")
    field.value.data, field.value.dtype = logprobs.tobytes(), FLOAT32
    field.value.offsets = (4 * math.prod(shape) * np.cumsum([0, *lengths])).astype(np.int64).tobytes()
    field.value.trailing_shape.extend(shape)
    output.metrics.add(key="loss:sum", value=float(answered.columns["losses"].astype(np.float64).sum()))
    for name, value in metrics.items():
        output.metrics.add(key=name, value=value)
    places = answered.metrics.get("tokens/trained", 0.0)
    for name, mean in answered.metrics.items():  # over places, of the value at the first place of each datum
        metric = name.removeprefix("custom_loss/")
        if metric != name:
            output.metrics.add(key=metric, value=mean * places / (len(lengths) if metric.endswith(":mean") else 1))
    encoded: bytes = output.SerializeToString()
    return encoded
