"""Every trained token is in exactly one row, with its own values; what cannot be trained is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from counterpoint.trainer.packer import InvalidBatch, ModelLimits, check, environment_names, pack, trained_tokens
from tests.support.batches import with_changes
from tests.trainer.conftest import EXPERTS, LAYERS, TOP_K, VOCABULARY, make_batch

LIMITS = ModelLimits(vocabulary=VOCABULARY, max_tokens=40, layers=LAYERS, experts=EXPERTS, top_k=TOP_K)
CPU = torch.device("cpu")


def test_samples_that_train_nothing_are_left_out() -> None:
    batch = make_batch(lengths=(5, 6, 0, 7))
    assert [*trained_tokens(batch)] == [0, 1, 3]
    batch.loss_mask_T[5:11] = 0
    assert [*trained_tokens(batch)] == [0, 3]
    batch.loss_mask_T[:] = 0
    assert trained_tokens(batch) == trained_tokens(make_batch(lengths=())) == {}


def test_a_row_carries_the_samples_own_values() -> None:
    batch = make_batch(lengths=(9, 6, 11), routed=True)
    micro = pack([(batch, [2, 0])], LIMITS, CPU)
    assert environment_names(batch) == ["guess", "reverse"]
    assert micro.sample_lengths == [11, 9]
    order = np.concatenate([np.arange(15, 26), np.arange(0, 9)])
    assert micro.token_ids_T.tolist() == batch.token_ids_T[order].tolist()
    assert micro.position_ids_T.tolist() == [*range(11), *range(9)]
    trained = order[batch.loss_mask_T[order] == 1]
    assert micro.targets_P.tolist() == batch.token_ids_T[trained].tolist()
    assert micro.token_ids_T[micro.predicting_P + 1].tolist() == micro.targets_P.tolist()
    assert micro.inference_log_probabilities_P.tolist() == batch.log_probabilities_T[trained].tolist()
    assert micro.advantages_P.tolist() == batch.advantages_T[trained].tolist()
    assert micro.environments_P.tolist() == [1] * len(trained)
    own = np.repeat(np.array([0.6, 0.8, 1.0], np.float32), (9, 6, 11))[trained]
    assert isinstance(micro.temperatures_P, torch.Tensor)
    assert micro.temperatures_P.tolist() == own.tolist()
    assert micro.routed_experts_TLK is not None
    assert micro.has_record_T.tolist() == [True] * 10 + [False] + [True] * 8 + [False]
    for start, sample, length in ((0, 2, 11), (11, 0, 9)):
        rows = micro.routed_experts_TLK[start : start + length - 1]
        assert rows.tolist() == np.concatenate(batch.routed_experts[sample]).tolist()


def test_tokens_after_those_with_routing_have_none() -> None:
    batch = make_batch(lengths=(9, 6, 11), routed=True)
    chunks = batch.routed_experts[2][0][:4]
    batch = replace(batch, routed_experts=(batch.routed_experts[0], (), (chunks,)))
    micro = pack([(batch, [2, 1, 0])], LIMITS, CPU)
    has = [[True] * len(chunks) + [False] * (11 - len(chunks)), [False] * 6, [True] * 8 + [False]]
    places = {11: has[0], 6: has[1], 9: has[2]}
    assert micro.has_record_T.tolist() == [each for length in micro.sample_lengths for each in places[length]]
    assert micro.routed_experts_TLK is not None
    start = sum(itertools.takewhile(lambda length: length != 11, micro.sample_lengths))
    assert micro.routed_experts_TLK[start : start + len(chunks)].tolist() == chunks.tolist()


def test_wide_routing_survives() -> None:
    batch = make_batch(lengths=(4,), routed=True)
    chunk = np.full((3, LAYERS, TOP_K), 299, dtype=np.uint16)
    batch = replace(batch, routed_experts=((chunk,),))
    micro = pack([(batch, [0])], replace(LIMITS, experts=300), CPU)
    assert micro.routed_experts_TLK is not None
    assert int(micro.routed_experts_TLK[:3].min()) == 299


def test_a_row_of_several_batches_is_their_rows_side_by_side() -> None:
    """What one row holds of each is what a row of it alone holds, and routing goes with its own tokens."""
    choices = [(make_batch(1, routed=True), [2, 0]), (make_batch(2), [1]), (make_batch(3, routed=True), [3])]
    together = pack(choices, LIMITS, CPU)
    alone = [pack([choice], LIMITS, CPU) for choice in choices]
    assert [part.samples for part in together.parts] == [[2, 0], [1], [3]]
    assert [part.tokens for part in together.parts] == [14, 17, 12]
    assert together.sample_lengths == [5, 9, 17, 12]
    starts = [0, 14, 31]
    for name in (
        "token_ids_T",
        "position_ids_T",
        "targets_P",
        "advantages_P",
        "environments_P",
        "temperatures_P",
        "has_record_T",
        "inference_log_probabilities_P",
    ):
        assert torch.equal(getattr(together, name), torch.cat([getattr(each, name) for each in alone])), name
    shifted = [each.predicting_P + start for each, start in zip(alone, starts, strict=True)]
    assert torch.equal(together.predicting_P, torch.cat(shifted))
    assert together.routed_experts_TLK is not None
    for each, start in zip(alone, starts, strict=True):
        rows = together.routed_experts_TLK[start : start + len(each.token_ids_T)]
        assert torch.equal(rows, torch.zeros_like(rows) if each.routed_experts_TLK is None else each.routed_experts_TLK)


def test_without_routing_nothing_is_recorded() -> None:
    micro = pack([(make_batch(), [0])], LIMITS, CPU)
    assert micro.routed_experts_TLK is None
    assert not micro.has_record_T.any()


def test_what_cannot_be_trained_is_refused() -> None:
    good = make_batch(lengths=(9, 17), routed=True)
    check(good, LIMITS)
    with pytest.raises(InvalidBatch, match=r"sample 1 \(1-1\) has 17 tokens.* 16 .*max_tokens"):
        check(good, replace(LIMITS, max_tokens=16))
    tokens = good.token_ids_T.copy()
    tokens[11] = VOCABULARY
    with pytest.raises(InvalidBatch, match=r"sample 1 \(1-1\), token 2: id 96 .*vocabulary of 96"):
        check(with_changes(good, token_ids_T=tokens), LIMITS)
    mask = good.loss_mask_T.copy()
    mask[9] = 1
    with pytest.raises(InvalidBatch, match=r"sample 1 \(1-1\): its first token is marked as trained"):
        check(with_changes(good, loss_mask_T=mask), LIMITS)
    with pytest.raises(InvalidBatch, match=r"routed experts of \[2, 2\] .* where the model has \[3, 2\]"):
        check(good, replace(LIMITS, layers=3))
    with pytest.raises(InvalidBatch, match=r"routed to expert \d of a model with 4 experts"):
        check(good, replace(LIMITS, experts=4))
    check(good, replace(LIMITS, layers=0, experts=0, top_k=0))
