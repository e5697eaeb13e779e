"""Probes: how they are read, and what they let pass; which ids and values an answer may not have."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from counterpoint.inference.base import (
    GenerateRequest,
    HeldWeights,
    Probe,
    RequestRefused,
    SamplingParameters,
    ScoreRequest,
    Scores,
    WrongAnswer,
)
from counterpoint.inference.model_facts import AnswerBounds
from counterpoint.transport.records import LOG_PROBABILITY_ROUNDING, Float32Array, Int32Array


def test_a_probe_is_read_as_it_was_published(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    path.write_bytes(orjson.dumps({"version": 3, "token_ids": [1, 2, 3], "log_probabilities": [-1.5, -2]}))
    assert Probe.read(path) == Probe(3, [1, 2, 3], [-1.5, -2.0])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"version": 1}',
        b'{"version": 1, "token_ids": [1], "log_probabilities": []}',
        b'{"version": 1, "token_ids": [1, 2], "log_probabilities": [-1, -2]}',
        b'{"version": 1, "token_ids": [1, 2], "log_probabilities": [null]}',
        b'{"version": 1, "token_ids": [1, 2], "log_probabilities": ["x"]}',
        b'{"version": 1, "token_ids": [1, 2], "log_probabilities": [-1], "previous": [-1, -1]}',
        b'{"version": 1, "token_ids": [1, 2], "log_probabilities": [-1], "previous": [null]}',
        b'{"version": 1, "token_ids": [1, 2], "log_probabilities": [-1], "rounding": [0, 0]}',
        b'{"version": 1, "token_ids": [1, 2], "log_probabilities": [-1], "rounding": [null]}',
        b'{"version": 1, "token_ids": [1, 2], "log_probabilities": [-1], "digests": {"float32": []}}',
        b" " * ((1 << 20) + 1),
    ],
)
def test_what_is_no_probe_is_refused_by_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "probe.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"probe\.json"):
        Probe.read(path)


def test_a_probe_may_hold_the_version_before_and_digests(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    proof = {"previous": [-1.25], "digests": {"float32": {"": "00", "3": "a1"}}, "rounding": [0.5]}
    path.write_bytes(orjson.dumps({"version": 3, "token_ids": [1, 2], "log_probabilities": [-1.5]} | proof))
    assert Probe.read(path) == Probe(3, [1, 2], [-1.5], [-1.25], {"float32": {"": "00", "3": "a1"}}, [0.5])


def test_a_digest_is_compared_in_the_servers_precision_where_both_know_it() -> None:
    probe = Probe(1, [5, 6], [-1.0], digests={"float32": {"": "aa", "0": "bb"}, "bfloat16": {"": "cc", "0": "dd"}})
    assert probe.mismatched_layers(HeldWeights("bfloat16", {"": "cc", "0": "dd"})) is None
    assert probe.mismatched_layers(HeldWeights("bfloat16", {"0": "dd"})) is None, "a layer may be beyond comparison"
    assert str(probe.mismatched_layers(HeldWeights("bfloat16", {"": "cc", "0": "bb"}))).endswith("published: layer 0")
    assert str(probe.mismatched_layers(HeldWeights("float32", {"": "cc"}))).endswith(
        "published: weights outside the layers"
    )


def test_an_answer_of_the_version_before_fails_however_small_the_step() -> None:
    random = np.random.default_rng(0)
    current = random.normal(-8.0, 2.0, 11)
    for step in (1e-4, 1e-2):
        former = current + random.normal(0.0, step, 11)
        probe = Probe(4, list(range(12)), current.tolist(), former.tolist())
        rounding = random.normal(0.0, step / 100, 11)
        assert probe.mismatch((current + rounding).astype(np.float32), None) is None
        found = probe.mismatch((former + rounding).astype(np.float32), None)
        assert found == "its log-probabilities are those of version 3: its kernels compute with older weights"


def test_right_answers_of_a_server_in_bfloat16_pass_where_the_trainer_is_precise() -> None:
    """Logits of 8 to 16 are multiples of 1/16 there: most tokens keep theirs, and some jump by a sixteenth."""
    random = np.random.default_rng(0)
    for step in (1e-5, 1e-3, 1e-2):
        for _ in range(1000):
            former = random.normal(-8.0, 3.0, 11)
            current = former + random.normal(0.0, step, 11)
            answer = np.round((current + random.normal(0.0, 0.005, 11)) * 16) / 16 + random.normal(0.0, 0.001, 11)
            probe = Probe(1, list(range(12)), current.tolist(), former.tolist())
            assert probe.mismatch(answer.astype(np.float32), None) is None


def test_right_answers_pass_however_coarse_the_rounding_is_beside_the_step() -> None:
    """Trainer and server round in bfloat16, at both versions, each in its own way."""
    random = np.random.default_rng(0)
    spread, rounding = 2.0, 0.03
    for step in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1):
        for _ in range(1000):
            truth = random.normal(-8.0, spread, 11)
            former, current, answer = truth + random.normal(0.0, rounding, (3, 11))
            probe = Probe(1, list(range(12)), current.tolist(), (former + random.normal(0.0, step, 11)).tolist())
            assert probe.mismatch(answer.astype(np.float32), None) is None


def test_without_a_tolerance_a_tenth_of_the_spread_is_allowed() -> None:
    probe = Probe(1, list(range(5)), [-4.0, -8.0, -4.0, -8.0])
    shifted = np.asarray(probe.log_probabilities, dtype=np.float32)
    assert probe.mismatch(shifted + np.float32(0.19), None) is None
    assert "may differ by 0.2000 nats" in str(probe.mismatch(shifted + np.float32(0.21), None))


ROUTED = [-4.0, -4.4, -5.0, -4.2, -4.8, -5.2, -4.1, -4.9, -4.5, -4.3, -4.7]
"""Answers of a mixture that has learned little, so that they hardly spread."""

REROUTED = np.array([0, 0, 0, -0.32, 0.03, -0.01, 0.02, 0, 0.01, -0.02, 0.01])
"""What another choice of experts for one token does to them, and to later ones, which look back at it."""


def test_what_rounding_does_to_the_routing_of_a_token_is_no_fault_of_its_server() -> None:
    """A job in bfloat16 died of this: "differ by 0.0981 (root mean square; at most 0.0493)"."""
    answer = (np.asarray(ROUTED) + REROUTED).astype(np.float32)
    assert Probe(1, list(range(12)), ROUTED).mismatch(answer, None, "bfloat16"), "no bound for all models is right"
    probe = Probe(1, list(range(12)), ROUTED, rounding=(np.abs(REROUTED) * 1.5).tolist())
    assert probe.mismatch(answer, None, "bfloat16") is None
    assert probe.mismatch(answer, None) is None, "of a stock server, whose precision is unknown"
    assert probe.mismatch(answer, None, "float32"), "there, rounding moves nothing that counts"
    assert probe.mismatch(answer, 0.09, "bfloat16"), "a tolerance that is set is what is allowed"


def test_wrong_kernels_fail_however_far_rounding_moves_some_tokens() -> None:
    probe = Probe(1, list(range(12)), ROUTED, rounding=(np.abs(REROUTED) * 1.5).tolist())
    random = np.random.default_rng(0)
    for _ in range(100):
        wrong = (np.asarray(ROUTED) + random.normal(0.0, 0.15, 11)).astype(np.float32)
        assert "probe_tolerance in [orchestrator.inference]" in str(probe.mismatch(wrong, None, "bfloat16"))


def test_a_token_that_the_trainer_routes_anew_does_not_make_a_right_server_seem_stale() -> None:
    """The step moves one token across a near tie, and nothing else by much; the server's rounding leaves it where it was."""
    former, current = np.asarray(ROUTED), np.asarray(ROUTED) + np.array([0, 0, 0, 0.4, *[0.001] * 7])
    answer = current + np.array([0, 0, 0, -0.38, *[0.002, -0.002] * 3, 0.001])
    rounding = np.array([0.001] * 3 + [0.5] + [0.01] * 7).tolist()
    probe = Probe(2, list(range(12)), current.tolist(), former.tolist(), rounding=rounding)
    assert probe.mismatch(answer.astype(np.float32), None, "bfloat16") is None


def test_a_probe_passes_within_the_tolerance_and_names_what_differs() -> None:
    probe = Probe(1, [5, 6, 7], [-1.0, -2.0])
    assert probe.mismatch(np.array([-1.01, -1.99], dtype=np.float32), 0.02) is None
    assert "probe token 2 is -2.5000 at the server and -2.0000 at the trainer" in str(
        probe.mismatch(np.array([-1.0, -2.5], dtype=np.float32), 0.02)
    )


@pytest.mark.parametrize("answer", [[-1.0], [-1.0, np.nan], [-np.inf, -2.0]])
def test_an_incomplete_or_infinite_answer_never_passes(answer: list[float]) -> None:
    assert Probe(1, [5, 6, 7], [-1.0, -2.0]).mismatch(np.array(answer, dtype=np.float32), 1e9)


@pytest.mark.parametrize(
    ("temperature", "max_tokens"), [(0.0, 1), (-1.0, 1), (float("inf"), 1), (float("nan"), 1), (1.0, 0)]
)
def test_sampling_that_makes_no_sense_is_refused(temperature: float, max_tokens: int) -> None:
    with pytest.raises(ValueError, match=r"temperature|max_tokens"):
        SamplingParameters(temperature=temperature, max_tokens=max_tokens)


IDS = st.sampled_from([-(2**31), -1, 0, 5, 9, 10, 2**31 - 1])


@given(arrays(np.int32, st.integers(0, 8), elements=IDS), st.sampled_from([None, 10]))
def test_the_first_id_that_is_no_token_is_named(token_ids: Int32Array, vocabulary: int | None) -> None:
    request = GenerateRequest("model", token_ids, SamplingParameters(temperature=1.0, max_tokens=8))
    bounds = AnswerBounds(vocabulary)
    most = 2**31 if vocabulary is None else vocabulary
    wrong = [token for token in token_ids.tolist() if not 0 <= token < most]
    if wrong:
        with pytest.raises(RequestRefused, match=f"the id {wrong[0]} is"):
            request.check(bounds)
    else:
        request.check(bounds)


@given(
    arrays(
        np.float32, st.integers(1, 6), elements=st.sampled_from([-np.inf, np.nan, np.inf, -80.0, 0.0, 2.0**-20, 0.5])
    )
)
def test_the_first_value_that_is_no_log_probability_is_named(values: Float32Array) -> None:
    request = ScoreRequest("model", np.arange(len(values) + 1, dtype=np.int32), 1)
    wrong = [index for index, value in enumerate(values.tolist()) if not -math.inf < value <= LOG_PROBABILITY_ROUNDING]
    if wrong:
        with pytest.raises(WrongAnswer, match=f"of token {wrong[0] + 1} is"):
            request.check(Scores(values))
    else:
        request.check(Scores(values))
