"""The SDK's data become contributions, and what came of them the SDK's output, as the SDK itself writes and reads them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from counterpoint.service.tinker import datums
from counterpoint.service.tinker.datums import DatumBatch, contribution_of, output_of
from counterpoint.service.tinker.proto import FLOAT32, INT64, LENGTH, MESSAGES
from counterpoint.service.tinker.refusals import BadRequest
from counterpoint.transport.messages import Answered
from counterpoint.transport.validation import validate
from tests.trainer.losses.traced import traced

LONGEST, VOCABULARY = 32, 100


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    arrays = {name: np.array(values) for name, values in inputs.items()}
    typed = {n: a.astype(np.int64 if n == "target_tokens" else np.float32) for n, a in arrays.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=typed)


def contribution(
    data: list[types.Datum],
    loss: Any,
    config: dict[str, float | str] | None = None,
    *,
    forward_only: bool = False,
    graph: bytes = b"",
) -> DatumBatch:
    """What the service makes of a request that the SDK encodes."""
    asked = types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config)
    message = forward_backward_request_to_proto(
        types.ForwardBackwardRequest(forward_backward_input=asked, model_id="m", seq_id=1)
    )
    message.forward_only = forward_only
    read = MESSAGES["ForwardBackwardRequest"].FromString(message.SerializeToString())
    return contribution_of(read, "run", LONGEST, VOCABULARY, graph)


def test_targets_are_predicted_at_their_own_places() -> None:
    found = contribution(
        [
            datum([1, 2, 3], target_tokens=[2, 3, 9], weights=[0, 1, 2]),
            datum([4], target_tokens=[5], weights=[0.5]),
        ],
        "cross_entropy",
    )
    validate(found.batch)
    columns = found.batch.columns
    assert columns["token_ids_T"].tolist() == [1, 2, 3, 9, 4, 5]
    assert columns["loss_mask_T"].tolist() == [0, 1, 1, 1, 0, 1]
    assert columns["sample_offsets"].tolist() == [0, 4, 6]
    assert np.frombuffer(found.objective.targets, np.int32).tolist() == [2, 2, 3, 9, 5, 5]
    assert np.frombuffer(found.objective.weights, np.float32).tolist() == [0, 0, 1, 2, 0, 0.5]
    assert found.objective.divisor == 1.0


def test_sparse_inputs_stand_for_no_more_numbers_than_a_request_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datums, "MOST_SPARSE", 47)
    message = MESSAGES["ForwardBackwardRequest"](loss_fn="cross_entropy")
    for _ in range(2):
        each = message.data.add()
        each.model_input.add().encoded_text.tokens = np.zeros(3, np.int32).tobytes()
        for name, dtype in (("target_tokens", INT64), ("weights", FLOAT32)):
            value = each.loss_fn_inputs.add(key=name).value
            value.dtype = dtype
            value.shape.extend([3, 4])
            value.sparse_csr.crow_indices = np.zeros(4, np.int64).tobytes()
    with pytest.raises(BadRequest, match="sparse"):
        contribution_of(message, "run", LONGEST, VOCABULARY)
    monkeypatch.setattr(datums, "MOST_SPARSE", 48)
    assert contribution_of(message, "run", LONGEST, VOCABULARY).targets == (4,)


def answered(found: DatumBatch, logprobs: Any, losses: list[float]) -> Any:
    """What the SDK reads of an answer with these log-probabilities and losses of all places."""
    columns = {}
    for name, values in (
        ("log_probabilities", np.array(logprobs, np.float32)),
        ("losses", np.array(losses, np.float32)),
    ):
        starts = np.cumsum([0, *found.lengths[:-1]])
        columns[name] = np.insert(values, starts, 0, axis=0).flatten()
    return deserialize_forward_backward_output(output_of(found, Answered(1, 0, columns=columns), {}))


def test_the_sdk_reads_log_probabilities_of_each_datum_and_the_sum_of_the_losses() -> None:
    one = contribution([datum([1, 2], target_tokens=[2, 8]), datum([3], target_tokens=[4])], "cross_entropy")
    output = answered(one, [-1, -2, -3], [1, 2, 3])
    assert output.metrics["loss:sum"] == 6.0
    assert [each["logprobs"].tolist() for each in output.loss_fn_outputs] == [[-1, -2], [-3]]


@pytest.mark.parametrize("sparse", [False, True])
def test_a_place_has_several_targets_with_weights(sparse: bool) -> None:
    wanted, weights = np.zeros((2, 8), np.int64), np.zeros((2, 8), np.float32)
    wanted[0, :2], wanted[1, 2] = (2, 8), 9
    weights[0, :2], weights[1, 2] = (0.5, 0.25), 1
    data = [datum([1, 2], target_tokens=wanted, weights=weights)]
    if sparse:
        inputs = {"target_tokens": torch.from_numpy(wanted), "weights": torch.from_numpy(weights)}
        tensors = {name: types.TensorData.from_torch_sparse(each) for name, each in inputs.items()}
        assert all(each.sparse_crow_indices is not None for each in tensors.values())
        data = [types.Datum(model_input=data[0].model_input, loss_fn_inputs=tensors)]
    found = contribution(data, "cross_entropy")
    assert np.frombuffer(found.objective.targets, np.int32).reshape(3, 8)[1:].tolist() == wanted.tolist()
    assert np.frombuffer(found.objective.weights, np.float32).reshape(3, 8).tolist() == [[0] * 8, *weights.tolist()]
    logprobs = -np.arange(16.0).reshape(2, 8)
    (output,) = answered(found, logprobs, [1, 1]).loss_fn_outputs
    assert output["logprobs"].to_numpy().tolist() == logprobs.tolist()


def test_bounds_of_the_ratio_are_those_of_the_request() -> None:
    data = [datum([1], target_tokens=[2], logprobs=[-1.0], advantages=[1.0])]
    config: dict[str, float | str] = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}
    cispo = contribution(data, "cispo", config).objective.loss
    assert cispo == {"kind": "cispo", "ratio_clip_low": 0.5, "ratio_clip": 1.5}
    assert contribution(data, "ppo", config).objective.loss == {
        "kind": "ppo", "ratio_to": "inference", "clip_low": 0.5, "clip_high": 0.5,
    }  # fmt: skip
    refused: list[tuple[str, dict[str, float | str]]] = [
        ("importance_sampling", {"clip_high_threshold": 1.5}),
        ("ppo", {"clip_low_threshold": 1.1}),
        ("cispo", {"clip_low_threshold": 1.5}),
        ("ppo", {"clip_high_threshold": math.inf}),
        ("dro", {}),
        ("dro", {"beta": "much"}),
        ("dro", {"beta": -1.0}),
    ]
    for loss, wrong in refused:
        with pytest.raises(BadRequest, match=r"clip_high|bounds|beta"):
            contribution(data, loss, wrong)


def test_without_a_backward_pass_the_objective_is_the_same() -> None:
    data = [datum([1, 2], target_tokens=[2, 3], weights=[1, 3])]
    found, other = (contribution(data, "cross_entropy", forward_only=only).objective for only in (True, False))
    assert (found.forward_only, other.forward_only) == (True, False)
    assert msgspec.structs.replace(found, forward_only=False) == other


@pytest.mark.parametrize(
    ("data", "loss", "said"),
    [
        ([datum([1, 2], target_tokens=[2], weights=[1, 1])], "cross_entropy", "target_tokens has 1"),
        ([datum([1], target_tokens=[VOCABULARY])], "cross_entropy", str(VOCABULARY)),
        ([datum([1] * LONGEST, target_tokens=[1] * LONGEST)], "cross_entropy", str(LONGEST)),
        ([datum([1], target_tokens=[2], weights=[math.inf])], "cross_entropy", "finite"),
        ([datum([1], target_tokens=[2], other=[1])], "cross_entropy", "other"),
        ([datum([1], target_tokens=[2], logprobs=[0.5], advantages=[1])], "ppo", "0.5"),
        ([datum([1], target_tokens=[2], advantages=[1])], "importance_sampling", "logprobs"),
        ([datum([1], target_tokens=[2], logprobs=[0], advantages=[1])], "stable_reinforce", "stable_reinforce"),
        ([datum([1], target_tokens=[2], logprobs=[0], advantages=[1])], "gspo", "sequence_ratio_mask"),
        ([datum([1], target_tokens=[2], logprobs=[0], advantages=[1], sequence_ratio_mask=[0])], "gspo", "marks no"),
        ([datum([1], target_tokens=[[2, 3]], logprobs=[[0, 0]], advantages=[[1, 1]])], "ppo", "several targets"),
        ([datum([1], target_tokens=[[2, 3]], weights=[1])], "cross_entropy", "weights has the shape"),
        ([datum([1], target_tokens=[[2] * 257])], "cross_entropy", "257"),
        ([datum([1], target_tokens=[[2, 3]]), datum([1], target_tokens=[[2]])], "cross_entropy", "several targets"),
    ],
)
def test_what_cannot_be_trained_is_refused(data: list[types.Datum], loss: str, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        contribution(data, loss)


def traced_loss(logprobs: Any, scale: Any, weights: Any) -> Any:
    return (scale * logprobs * weights.sum(-1)).sum(), {"custom/a:sum": scale, "custom/b:mean": weights.max()}


RANKS: dict[str, Any] = {"logprobs": 1, "scale": 0, "weights": 2}


def test_a_traced_loss_gets_what_it_reads_and_its_metrics_are_told() -> None:
    data = [
        datum([1, 2], target_tokens=[2, 3], scale=3.0, weights=[[1, 2], [3, 4]], unread=[9]),
        datum([4], target_tokens=[5], scale=7.0, weights=[[5, 6]]),
    ]
    found = contribution(data, "custom", {"loss_id": "any"}, graph=traced(traced_loss, RANKS))
    inputs = {name: np.frombuffer(each.data, each.dtype) for name, each in found.objective.inputs.items()}
    assert inputs["scale"].tolist() == [0, 3, 3, 0, 7]
    assert inputs["weights"].reshape(5, 2).tolist() == [[0, 0], [1, 2], [3, 4], [0, 0], [5, 6]]
    metrics = {"custom_loss/custom/a:sum": 10 / 3, "custom_loss/custom/b:mean": 10 / 3, "tokens/trained": 3.0}
    columns = {name: np.zeros(5, np.float32) for name in ("log_probabilities", "losses")}
    output = deserialize_forward_backward_output(output_of(found, Answered(1, 0, metrics=metrics, columns=columns), {}))
    assert output.metrics == pytest.approx({"loss:sum": 0.0, "custom/a:sum": 10.0, "custom/b:mean": 5.0})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scale": [1.0, 2.0]}, "scale"),
        ({"weights": [1.0, 2.0]}, "rank 2"),
        ({"weights": [[1.0]]}, "weights"),
        ({"weights": [[math.inf], [1.0]]}, "finite"),
        ({"target_tokens": [[2], [3]]}, "rank 2, logprobs"),
    ],
)
def test_what_a_traced_loss_cannot_read_is_refused(changes: dict[str, Any], said: str) -> None:
    whole: dict[str, Any] = {"target_tokens": [2, 3], "scale": 3.0, "weights": [[1], [3]]}
    with pytest.raises(BadRequest, match=said):
        contribution([datum([1, 2], **(whole | changes))], "custom", graph=traced(traced_loss, RANKS))
    del whole["scale"]
    with pytest.raises(BadRequest, match="lacks scale"):
        contribution([datum([1, 2], **whole)], "custom", graph=traced(traced_loss, RANKS))


CSR = [
    ([0, 1, 1], [0], [5.0], [2, 2], True),
    ([0, 1], [0], [5.0], [2, 2], False),
    ([0, 2, 1], [0], [5.0], [2, 2], False),
    ([1, 1, 1], [0], [5.0], [2, 2], False),
    ([0, 1, 1], [2], [5.0], [2, 2], False),
    ([0, 1, 1], [-1], [5.0], [2, 2], False),
    ([0, 1, 1], [0, 1], [5.0], [2, 2], False),
    ([0, 0, 9], [0], [5.0], [2, 2], False),
    ([0, 1, 1], [0], [5.0], [2], False),
    ([0, 1, 1], [0], [5.0], [2, 2**40], False),
    ([0, 1, 1], [0], [5.0], [2**40, 2], False),
]


@pytest.mark.parametrize(("rows", "columns", "values", "shape", "is_valid"), CSR)
def test_compressed_rows_that_do_not_fit_are_refused(
    rows: list[int], columns: list[int], values: list[float], shape: list[int], is_valid: bool
) -> None:
    message = MESSAGES["ForwardBackwardRequest"](loss_fn="cross_entropy")
    each = message.data.add()
    each.model_input.add().encoded_text.tokens = np.array([1, 2], np.int32).tobytes()
    targets = each.loss_fn_inputs.add(key="target_tokens").value
    targets.dense, targets.dtype = np.array([[1, 2], [3, 4]]).tobytes(), 2
    targets.shape.extend([2, 2])
    weights = each.loss_fn_inputs.add(key="weights").value
    weights.dtype = 1
    weights.shape.extend(shape)
    weights.sparse_csr.values = np.array(values, np.float32).tobytes()
    weights.sparse_csr.crow_indices = np.array(rows).tobytes()
    weights.sparse_csr.col_indices = np.array(columns).tobytes()
    if is_valid:
        found = contribution_of(message, "run", LONGEST, VOCABULARY).objective.weights
        assert np.frombuffer(found, np.float32).reshape(3, 2)[1:].tolist() == [[5, 0], [0, 0]]
    else:
        with pytest.raises(BadRequest, match="weights"):
            contribution_of(message, "run", LONGEST, VOCABULARY)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(body: bytes) -> None:
    from google.protobuf.message import DecodeError

    try:
        contribution_of(MESSAGES["ForwardBackwardRequest"].FromString(body), "run", LONGEST, VOCABULARY)
    except (BadRequest, DecodeError):
        pass


def test_the_sdk_reads_a_sample() -> None:
    response = MESSAGES["SampleResponse"]()
    response.sequences.add(
        stop_reason=LENGTH,
        tokens=np.array([4, 5], np.int32).tobytes(),
        logprobs=np.array([-1, -2], np.float32).tobytes(),
    )
    response.prompt_logprobs = np.array([np.nan, -3], np.float32).tobytes()
    found = deserialize_sample_response(response.SerializeToString())
    assert found.sequences[0].stop_reason == "length"
    assert list(found.sequences[0].tokens) == [4, 5]
    assert found.prompt_logprobs == [None, -3.0]
