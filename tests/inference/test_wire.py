"""The binary encoding: what is sent arrives, and what is malformed is refused with a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.inference import wire
from counterpoint.inference.base import (
    AnswerToAnother,
    Completion,
    GenerateRequest,
    SamplingParameters,
    ScoreRequest,
    Scores,
    ServerFailure,
)
from counterpoint.inference.loads import Origin
from counterpoint.transport.records import MOST_ALTERNATIVES, Alternatives
from tests.support.fake_inference import with_sampling

REQUEST = GenerateRequest("m", np.array([1, 2], dtype=np.int32), SamplingParameters(temperature=1.0, max_tokens=4))
ORIGIN = Origin("5c0f", "a", 3, 4, "load 4: version 9, by run 'a'")
SCORES = Scores(np.array([-1], dtype=np.float32), ORIGIN, REQUEST.echo)

token_ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50).map(lambda ids: np.array(ids, dtype=np.int32))


@given(
    token_ids,
    st.builds(
        SamplingParameters,
        temperature=st.floats(0.01, 2),
        max_tokens=st.integers(1, 10**6),
        top_p=st.floats(0.01, 1),
        top_k=st.integers(0, 2**31 - 1),
        min_p=st.floats(0, 1),
        stop=st.lists(st.text(min_size=1, max_size=256), max_size=32),
        stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=4),
        json_schema=st.text(max_size=20),
        alternatives=st.integers(0, MOST_ALTERNATIVES),
    ),
    st.data(),
)
def test_a_request_arrives_as_it_was_sent(
    prompt_ids: np.ndarray[tuple[int], np.dtype[np.int32]],
    sampling: SamplingParameters,
    data: st.DataObject,
) -> None:
    start = data.draw(st.integers(0, len(prompt_ids)))
    sent = GenerateRequest("a model", prompt_ids, sampling, start)
    body = wire.encode_request(sent)
    received = wire.decode_request(body)
    assert received.prompt_ids.tolist() == sent.prompt_ids.tolist()
    assert (received.model, received.sampling, received.routed_experts_start) == (sent.model, sent.sampling, start)
    assert len(body) <= wire.max_request_bytes(len(prompt_ids))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"temperature": 0.0}, "temperature = 0.0"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"temperature": "hot"}, "temperature = 'hot'"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"max_tokens": True}, "max_tokens = True"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 1000}, "the map of sampling parameters is not msgpack"),
        ({"stop": ["x"] * 33}, "stop = .*32"),
        ({"stop": ["x" * 257]}, r"stop\.0 = .*256"),
        ({"stop": [1]}, r"stop\.0 = 1"),
        ({"stop": [""]}, r"stop\.0 = ''"),
        ({"top_p": 0}, "top_p = 0"),
        ({"top_p": float("nan")}, "top_p = nan"),
        ({"min_p": 1.5}, "min_p = 1.5"),
        ({"top_k": -1}, "top_k = -1"),
        ({"top_k": 2.5}, "top_k = 2.5"),
        ({"alternatives": 21}, "alternatives = 21"),
    ],
)
def test_malformed_sampling_is_refused_by_field(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        wire.decode_request(with_sampling(REQUEST, {**REQUEST.sampling.named, **change}))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"prompt_ids": np.array([], dtype=np.int32)}, "prompt_ids: 0 tokens"),
        ({"routed_experts_start": 3}, "routed_experts_start = 3"),
        ({"model": ""}, "model: a name of 0 characters"),
        ({"model": "m" * (wire.MAX_MODEL_NAME + 1)}, "model: a name of 4097 characters"),
    ],
)
def test_a_malformed_request_is_refused_by_field(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        wire.decode_request(wire.encode_request(replace(REQUEST, **change)))


@given(st.data())
def test_a_request_that_is_cut_or_changed_is_read_or_refused(data: st.DataObject) -> None:
    body = bytearray(wire.encode_request(REQUEST))
    for _ in range(data.draw(st.integers(0, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        wire.decode_request(bytes(body[: data.draw(st.integers(0, len(body)))]))
    except ValueError:
        return


def test_requests_with_the_same_sampling_parameters_share_them() -> None:
    one, other = (
        wire.decode_request(wire.encode_request(GenerateRequest("m", REQUEST.prompt_ids, sampling)))
        for sampling in (SamplingParameters(top_k=3), SamplingParameters(top_k=3))
    )
    assert one.sampling is other.sampling
    assert one.request_id != other.request_id


def test_a_request_of_another_version_is_refused_with_its_reason() -> None:
    with pytest.raises(ValueError, match="another version"):
        wire.decode_request(msgpack.packb({"model": "m", "prompt_ids": b"1234", **REQUEST.sampling.named}))


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader_of_requests(body: bytes) -> None:
    for begun in (body, b"CPR1" + body):
        with pytest.raises(ValueError, match=r"body|prompt_ids|start|model|sampling"):
            wire.decode_request(begun)


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader_of_responses(body: bytes) -> None:
    for begun in (body, b"CPC1" + body):
        with pytest.raises(ServerFailure):
            wire.decode_completion(begun)


@given(st.data())
def test_a_response_that_is_cut_is_refused_and_a_changed_one_is_read_or_refused(data: st.DataObject) -> None:
    for sent in (completion(), replace(completion(), routed_experts=None)):
        body = wire.encode_completion(sent)
        with pytest.raises(ServerFailure):
            wire.decode_completion(body[: data.draw(st.integers(0, len(body) - 1))])
        changed = bytearray(body)
        changed[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
        try:
            wire.decode_completion(bytes(changed))
        except ServerFailure:
            continue


def completion(tokens: int = 3, rows: int = 4, dtype: str = "uint8") -> Completion:
    return Completion(
        token_ids=np.arange(tokens, dtype=np.int32),
        log_probabilities=-np.arange(tokens, dtype=np.float32),
        finish_reason="stop",
        routed_experts=np.arange(rows * 4, dtype=dtype).reshape(rows, 2, 2),
        origin=ORIGIN,
        echo=REQUEST.echo,
    )


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_a_response_arrives_as_views_of_its_bytes(dtype: str) -> None:
    sent = completion(dtype=dtype)
    received = wire.decode_completion(wire.encode_completion(sent))
    assert received.token_ids.tolist() == [0, 1, 2]
    assert received.log_probabilities.tolist() == [0, -1, -2]
    assert received.routed_experts is not None
    assert sent.routed_experts is not None
    assert received.routed_experts.dtype == dtype
    assert (received.routed_experts == sent.routed_experts).all()
    assert not received.routed_experts.flags.owndata


@pytest.mark.parametrize("cached", [None, 0, 2])
def test_a_response_says_how_much_of_its_prompt_was_cached(cached: int | None) -> None:
    received = wire.decode_completion(wire.encode_completion(replace(completion(), cached_tokens=cached)))
    assert received.cached_tokens == cached


@pytest.mark.parametrize(("origin", "echo"), [(ORIGIN, None), (None, REQUEST.echo)], ids=["no echo", "no origin"])
def test_scores_that_do_not_name_their_weights_or_their_request_are_refused(
    origin: Origin | None, echo: bytes | None
) -> None:
    with pytest.raises(ServerFailure, match="does not say which"):
        wire.decode_scores(wire.encode_scores(replace(SCORES, origin=origin, echo=echo)))


def test_a_long_description_is_refused_before_it_is_kept() -> None:
    kept = wire._described.cache_info().currsize
    with pytest.raises(ServerFailure, match="description has 100"):
        wire.decode_completion(wire.encode_completion(replace(completion(), finish_reason="x" * 100_000)))
    assert wire._described.cache_info().currsize == kept


def test_a_response_that_does_not_name_its_weights_is_refused() -> None:
    with pytest.raises(ServerFailure, match="does not say which"):
        wire.decode_completion(wire.encode_completion(replace(completion(), origin=None)))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [({"echo": None}, "no echo"), ({"log_probabilities": np.zeros(2, np.float32)}, "3 tokens with 2 log-prob")],
)
def test_a_response_that_the_form_has_no_place_for_is_not_sent(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        wire.encode_completion(replace(completion(), **change))


def test_a_response_names_its_weights_and_its_request() -> None:
    answer = wire.decode_completion(wire.encode_completion(completion()))
    scores = wire.decode_scores(wire.encode_scores(SCORES))
    assert (answer.origin, answer.echo) == (scores.origin, scores.echo) == (ORIGIN, REQUEST.echo)


@given(token_ids, token_ids)
def test_no_other_tokens_and_no_other_request_have_the_same_echo(
    one: np.ndarray[tuple[int], np.dtype[np.int32]], other: np.ndarray[tuple[int], np.dtype[np.int32]]
) -> None:
    asked = GenerateRequest("m", one, REQUEST.sampling)
    assert wire.decode_request(wire.encode_request(asked)).echo == asked.echo
    assert asked.echo != GenerateRequest("m", one, REQUEST.sampling).echo
    same_id = GenerateRequest("m", other, REQUEST.sampling, 0, asked.request_id)
    assert (same_id.echo == asked.echo) == (one.tolist() == other.tolist())


def test_an_answer_to_another_request_is_a_failure_with_a_name_of_its_own() -> None:
    with pytest.raises(AnswerToAnother, match="another request"):
        completion().check(replace(REQUEST, request_id=bytes(16)))
    with pytest.raises(AnswerToAnother, match="another request"):
        ScoreRequest("m", REQUEST.prompt_ids, 1).check(SCORES)


def test_an_answer_that_fits_its_request_passes() -> None:
    completion().check(REQUEST)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"token_ids": np.arange(5, dtype=np.int32)}, "5 tokens came back where at most 4"),
        ({"log_probabilities": np.zeros(2, dtype=np.float32)}, "3 tokens came back with 2 log-probabilities"),
        ({"log_probabilities": np.array([0, np.nan, 0], dtype=np.float32)}, "completion token 1 is nan"),
        ({"finish_reason": "abort"}, "gave up"),
        ({"token_ids": np.array([1, -2, 3], dtype=np.int32)}, "the id -2 is no token"),
        ({"log_probabilities": np.array([0, 0.1, 0], dtype=np.float32)}, "completion token 1 is 0.1"),
        ({"routed_experts": np.zeros((5, 2, 2), dtype=np.uint8)}, "4 rows of"),
        ({"routed_experts": np.zeros((4, 2), dtype=np.uint8)}, "4 rows of"),
    ],
)
def test_an_answer_that_cannot_be_one_is_a_failure_of_the_server(change: dict[str, object], complaint: str) -> None:
    good = completion()
    fields = {
        name: getattr(good, name) for name in ("token_ids", "log_probabilities", "finish_reason", "routed_experts")
    }
    with pytest.raises(ServerFailure, match=complaint):
        Completion(**(fields | change)).check(REQUEST)


ASKED = replace(REQUEST, sampling=REQUEST.sampling.replaced(alternatives=2))
ALTERNATIVES = Alternatives(np.arange(6, dtype=np.int32).reshape(3, 2), -np.ones((3, 2), dtype=np.float32))


def test_alternatives_arrive_and_fit_their_request() -> None:
    sent = replace(completion(), alternatives=ALTERNATIVES)
    received = wire.decode_completion(wire.encode_completion(sent))
    assert received.alternatives is not None
    assert received.alternatives.token_ids_TK.tolist() == ALTERNATIVES.token_ids_TK.tolist()
    assert received.alternatives.log_probabilities_TK.tolist() == ALTERNATIVES.log_probabilities_TK.tolist()
    received.check(replace(ASKED, request_id=REQUEST.request_id))
    assert wire.decode_completion(wire.encode_completion(completion())).alternatives is None


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (None, "none came back"),
        ({"token_ids_TK": ALTERNATIVES.token_ids_TK[:2]}, r"shape \(2, 2\)"),
        ({"token_ids_TK": -ALTERNATIVES.token_ids_TK}, "the id -1 is no token"),
        ({"log_probabilities_TK": np.full((3, 2), np.nan, np.float32)}, "no number of 0 or less"),
    ],
)
def test_alternatives_that_cannot_be_are_a_failure_of_the_server(
    change: dict[str, object] | None, complaint: str
) -> None:
    wrong = None if change is None else replace(ALTERNATIVES, **change)  # type: ignore[arg-type]
    with pytest.raises(ServerFailure, match=complaint):
        replace(completion(), alternatives=wrong).check(replace(ASKED, request_id=REQUEST.request_id))
