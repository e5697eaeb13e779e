"""Batches of which each rank gets its own samples: a filled part packs to what the whole batch packs to."""

from __future__ import annotations

import msgpack
import numpy as np
import torch

from counterpoint.trainer.packer import ModelLimits, pack
from counterpoint.trainer.work import batch_parts
from counterpoint.transport import codec
from tests.support.batches import with_changes
from tests.trainer.conftest import EXPERTS, LAYERS, TOP_K, VOCABULARY, make_batch

LIMITS = ModelLimits(VOCABULARY, 64, LAYERS, EXPERTS, TOP_K)


def test_the_samples_of_a_rank_pack_as_those_of_the_whole_batch() -> None:
    whole = make_batch(3, routed=True)
    column_T = np.where(whole.loss_mask_T, -0.5, 0).astype(np.float32)
    whole = with_changes(whole, teacher_log_probabilities=column_T, rewards=column_T * 2)
    header, arrays = batch_parts.outline(whole)
    own = batch_parts.unfilled(msgpack.unpackb(msgpack.packb(header)), arrays)
    for samples in ([2, 0], [3]):
        frames = codec.encode(batch_parts.part(whole, samples))
        batch_parts.fill(own, samples, codec.decode([bytes(frame) for frame in frames], 2**20))
    for samples in ([0, 3], [2]):
        expected, found = (pack([(batch, samples)], LIMITS, torch.device("cpu")) for batch in (whole, own))
        for name in ("token_ids_T", "targets_P", "inference_log_probabilities_P", "advantages_P"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        temperatures = [torch.as_tensor(each.temperatures_P) for each in (found, expected)]
        assert torch.equal(*temperatures)
        assert torch.equal(found.environments_P, expected.environments_P)
        assert found.routed_experts_TLK is not None
        assert expected.routed_experts_TLK is not None
        assert torch.equal(found.routed_experts_TLK, expected.routed_experts_TLK)
        assert torch.equal(found.has_record_T, expected.has_record_T)
        for column, values_P in expected.columns_P.items():
            assert torch.equal(found.columns_P[column], values_P)
    assert not own.token_ids_T[9:26].any(), "sample 1 was not sent"
    assert np.array_equal(own.loss_mask_T, whole.loss_mask_T)
    assert np.array_equal(own.advantages_T, whole.advantages_T)
    assert np.array_equal(own.columns["rewards"], whole.columns["rewards"])
    assert len(arrays) < sum(len(bytes(frame)) for frame in codec.encode(whole)) / 2
