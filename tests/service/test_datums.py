"""The SDK's data become contributions, and what came of them the SDK's output, as the SDK itself writes and reads them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from counterpoint.service.tinker.datums import BadRequest, Contribution, contribution_of, output_of
from counterpoint.service.tinker.proto import LENGTH, MESSAGES
from counterpoint.transport.messages import Answered
from counterpoint.transport.validation import validate

LONGEST, VOCABULARY = 32, 100


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    arrays = {name: np.array(values) for name, values in inputs.items()}
    typed = {n: a.astype(np.int64 if n == "target_tokens" else np.float32) for n, a in arrays.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=typed)


def contribution(
    data: list[types.Datum], loss: Any, config: dict[str, float | str] | None = None, *, forward_only: bool = False
) -> Contribution:
    """What the service makes of a request that the SDK encodes."""
    asked = types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config)
    message = forward_backward_request_to_proto(
        types.ForwardBackwardRequest(forward_backward_input=asked, model_id="m", seq_id=1)
    )
    message.forward_only = forward_only
    read = MESSAGES["ForwardBackwardRequest"].FromString(message.SerializeToString())
    return contribution_of(read, "run", LONGEST, VOCABULARY)


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
    assert np.frombuffer(found.objective.targets, np.int32).tolist() == [1, 2, 3, 9, 4, 5]
    assert np.frombuffer(found.objective.weights, np.float32).tolist() == [0, 0, 1, 2, 0, 0.5]
    assert found.objective.divisor == 1.0


def answered(found: Contribution, logprobs: list[float]) -> Any:
    """What the SDK reads of an answer with these log-probabilities of all places."""
    spread, left = [], iter(logprobs)
    for length in found.lengths:
        spread += [0.0, *(next(left) for _ in range(length))]
    columns = {"log_probabilities": np.array(spread, np.float32)}
    return deserialize_forward_backward_output(output_of(found, Answered(1, 0, columns=columns)))


log_probabilities = st.lists(st.floats(-5, 0, width=32), min_size=3, max_size=3)


@given(log_probabilities, log_probabilities, st.lists(st.floats(-2, 2, width=32), min_size=3, max_size=3))
def test_losses_are_those_of_a_plain_loop(new: list[float], old: list[float], values: list[float]) -> None:
    tokens, targets = [[1, 2], [3]], [[2, 8], [4]]
    parts = (slice(0, 2), slice(2, 3))
    cases: dict[str, dict[str, list[float]]] = {
        "cross_entropy": {"weights": values},
        "importance_sampling": {"logprobs": old, "advantages": values},
        "ppo": {"logprobs": old, "advantages": values},
    }
    for loss, inputs in cases.items():
        data = [
            datum(ids, target_tokens=wanted, **{name: column[part] for name, column in inputs.items()})
            for ids, wanted, part in zip(tokens, targets, parts, strict=True)
        ]
        output = answered(contribution(data, loss), new)
        total = 0.0
        for log_probability, before, value in zip(new, old, values, strict=True):
            ratio = math.exp(log_probability - before)
            if loss == "cross_entropy":
                total -= log_probability * value
            elif loss == "importance_sampling":
                total -= ratio * value
            else:
                total -= min(ratio * value, min(max(ratio, 0.8), 1.2) * value)
        assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-6, abs=1e-6)
        assert [list(each["logprobs"].data) for each in output.loss_fn_outputs] == [new[:2], new[2:]]


def test_bounds_of_the_ratio_are_those_of_the_request() -> None:
    data = [datum([1], target_tokens=[2], logprobs=[-1.0], advantages=[1.0])]
    config: dict[str, float | str] = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}
    assert contribution(data, "ppo", config).objective.loss == {
        "kind": "ppo", "ratio_to": "inference", "clip_low": 0.5, "clip_high": 0.5,
    }  # fmt: skip
    with pytest.raises(BadRequest, match="clip_high"):
        contribution(data, "importance_sampling", {"clip_high_threshold": 1.5})


def test_without_a_backward_pass_no_token_has_a_gradient_and_the_loss_is_the_same() -> None:
    data = [datum([1, 2], target_tokens=[2, 3], weights=[1, 3])]
    found = contribution(data, "cross_entropy", forward_only=True)
    assert not np.frombuffer(found.objective.weights, np.float32).any()
    assert answered(found, [-1.0, -2.0]).metrics["loss:sum"] == pytest.approx(7.0)


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
        ([datum([1], target_tokens=[2])], "dro", "dro"),
    ],
)
def test_what_cannot_be_trained_is_refused(data: list[types.Datum], loss: str, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        contribution(data, loss)


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
