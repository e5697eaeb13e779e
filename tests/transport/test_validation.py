"""Every way in which a batch can disagree with itself is named, with sample and field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given

from counterpoint.transport.records import Batch, SampleInfo
from counterpoint.transport.validation import validate
from tests.support.batches import batches, make_batch, with_changes


@given(batches())
def test_valid_batches_pass(batch: Batch) -> None:
    validate(batch)


def changed(array: np.ndarray, index: int, value: float) -> np.ndarray:
    copy = array.copy()
    copy[index] = value
    return copy


GOOD = make_batch(lengths=(5, 3))
ONE, TWO = GOOD.routed_experts
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "run id": ({"run_id": "a/b"}, "run_id"),
    "run id with a newline": ({"run_id": "a\n"}, "run_id"),
    "step": ({"step": 0}, "step: 0"),
    "lengths": ({"advantages_T": GOOD.advantages_T[:-1]}, "advantages_T: 7 values where token_ids_T has 8"),
    "a frame that no wire takes": (
        {"advantages_T": np.broadcast_to(np.float32(0), 2**30 + 1)},
        "an array of 4294967300 bytes; one column",
    ),
    "dtype": ({"token_ids_T": GOOD.token_ids_T.astype(np.int64)}, "token_ids_T: int64"),
    "NaN": (
        {"log_probabilities_T": changed(GOOD.log_probabilities_T, 6, np.nan)},
        r"sample 1 \(rollout-1\): log_probabilities_T is nan at its token 1",
    ),
    "positive": ({"log_probabilities_T": changed(GOOD.log_probabilities_T, 0, 0.01)}, "log_probabilities_T is 0.00999"),
    "infinite": (
        {"advantages_T": changed(GOOD.advantages_T, 4, np.inf)},
        r"sample 0 .* advantages_T is inf at its token 4",
    ),
    "mask": ({"loss_mask_T": changed(GOOD.loss_mask_T, 5, 2)}, r"sample 1 .* loss_mask_T is 2 at its token 0"),
    "token": ({"token_ids_T": changed(GOOD.token_ids_T, 1, -1)}, "token_ids_T is -1"),
    "offsets' end": ({"sample_offsets": np.array([0, 5, 7])}, "from 0 to 7; expected from 0 to 8"),
    "offsets' number": ({"sample_offsets": np.array([0, 8])}, "2 values for 2 samples"),
    "an empty sample": ({"sample_offsets": np.array([0, 0, 8])}, "sample 0: sample_offsets go from 0 to 0"),
    "reward": (
        {"samples": (GOOD.samples[0], SampleInfo("r", "e", 0, float("nan"), 1.0))},
        r"sample 1 \(r\): reward is nan",
    ),
    "version": ({"samples": (GOOD.samples[0], SampleInfo("r", "e", -1, 0.0, 1.0))}, "policy_version is -1"),
    "temperature": (
        {"samples": (GOOD.samples[0], SampleInfo("r", "e", 0, 0.0, 0.0))},
        r"sample 1 \(r\): temperature is 0.0; expected a positive, finite number",
    ),
    "routing rows": ({"routed_experts": (ONE, TWO[1:])}, r"sample 1 .* have 1 rows for 3 tokens; expected 2"),
    "routing samples": ({"routed_experts": (ONE,)}, "for 1 samples of 2"),
    "routing dtype": ({"routed_experts": (ONE, (TWO[0], TWO[1].astype(np.uint16)))}, "agree in dtype"),
    "routing top_k": ({"routed_experts": (ONE, (TWO[0], TWO[1][:, :, :1]))}, "agree in dtype, layers and top_k"),
    "routing shape": (
        {"routed_experts": (ONE, tuple(chunk[0] for chunk in TWO))},
        r"expected uint8 or uint16 \[tokens",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_batch_is_named(name: str) -> None:
    fields, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        validate(with_changes(GOOD, **fields))


def test_the_last_tokens_of_an_items_sample_may_be_without_routing() -> None:
    for chunks in ((ONE, TWO[1:]), (ONE, ())):
        validate(with_changes(GOOD, routed_experts=chunks), whole_routing=False)
    with pytest.raises(ValueError, match=r"sample 1 .* have 4 rows for 3 tokens; expected up to 2"):
        validate(with_changes(GOOD, routed_experts=(ONE, TWO * 2)), whole_routing=False)


def test_a_certainty_may_round_above_zero() -> None:
    validate(with_changes(GOOD, log_probabilities_T=changed(GOOD.log_probabilities_T, 0, 5e-4)))
