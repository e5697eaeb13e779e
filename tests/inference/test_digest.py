"""The digest of weights: the same however an engine lays them out, another as soon as one bit of one element is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from counterpoint.inference.digest import (
    DTYPES,
    add_up,
    digest_of,
    digests_of,
    hash_sum,
    is_of_text,
    layer_of,
    scaled_adapter,
)

ROWS, COLUMNS = 12, 8


def weight(seed: int, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_fusing_sharding_padding_and_reordering_change_nothing(dtype: torch.dtype) -> None:
    query, key, value = weight(0), weight(1, 4), weight(2, 4)
    names = [f"model.layers.3.self_attn.{name}_proj.weight" for name in "qkv"]
    given_digest = digest_of(zip(names, (query, key, value), strict=True), dtype)
    padded = torch.cat([query, key, value, torch.zeros(5, COLUMNS)]).to(dtype)
    reordered = padded.t().contiguous().flip(0)
    shards = [(f"language_model.model.layers.3.qkv.{rank}", shard) for rank, shard in enumerate(reordered.split(3))]
    assert digest_of(shards, dtype) == given_digest


@given(
    element=st.integers(0, ROWS * COLUMNS - 1),
    bit=st.integers(0, 31),
    dtype=st.sampled_from(list(DTYPES)),
)
def test_one_bit_of_one_element_changes_the_digest_unless_it_is_rounded_away(
    element: int, bit: int, dtype: str
) -> None:
    before = weight(0)
    bits = before.flatten().numpy().view(np.uint32).copy()
    bits[element] ^= np.uint32(1 << bit)
    after = torch.from_numpy(bits.view(np.float32))
    same = torch.equal(before.flatten().to(DTYPES[dtype]), after.to(DTYPES[dtype]))
    assert (int(hash_sum(before, DTYPES[dtype])) == int(hash_sum(after, DTYPES[dtype]))) == same


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_small_tensors_of_a_layer_are_hashed_together_and_sum_up_alike(dtype: torch.dtype) -> None:
    tensors = {
        f"layers.{index % 3}.{index}": weight(index, rows) for index, rows in enumerate((1, 5, 3000, 7, 2049, 2))
    }
    tensors |= {"head": weight(9).double(), "norm": weight(10).half(), "count": torch.ones(2, dtype=torch.int64)}
    one_by_one = add_up(
        (name, int(hash_sum(tensor, dtype))) for name, tensor in tensors.items() if tensor.is_floating_point()
    )
    assert digest_of(tensors.items(), dtype) == one_by_one


def test_an_exchange_between_layers_is_seen_and_one_of_zeros_signs_is_not() -> None:
    first, second = weight(0), weight(1)
    digest = digest_of([("layers.0.w", first), ("layers.1.w", second)], torch.float32)
    assert digest_of([("layers.0.w", second), ("layers.1.w", first)], torch.float32) != digest
    zeros = torch.zeros(4)
    assert int(hash_sum(-zeros, torch.float32)) == int(hash_sum(zeros, torch.float32)) == 0


def test_names_tell_the_layer_by_whichever_convention() -> None:
    assert layer_of("model.layers.17.mlp.experts.3.up_proj.weight") == "17"
    assert layer_of("base_model.model.transformer.h.2.attn.lora_A.weight") == "2"
    assert layer_of("lm_head.weight") == ""


def test_sums_are_modulo_two_to_the_64th() -> None:
    assert add_up([("a", -1), ("b.0", 5)]) == {"": "f" * 16, "0": f"{5:016x}"}
    assert add_up([("a", 1 << 63), ("a", 1 << 63)]) == {"": "0" * 16}


def test_a_bfloat16_broadcast_has_one_digest_in_bfloat16_and_float32() -> None:
    digests = digests_of({"w": weight(0).to(torch.bfloat16), "count": torch.ones(3, dtype=torch.int64)})
    assert digests["float32"] == digests["bfloat16"]
    assert digests_of({"w": weight(0)})["float32"] != digests_of({"w": weight(0)})["bfloat16"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_digest_in_one_precision_is_that_among_all(dtype: torch.dtype) -> None:
    weights = {"layers.0.w": weight(0).to(dtype), "head": weight(1).to(dtype)}
    for precision, digest in digests_of(weights).items():
        assert digests_of(weights, [precision]) == {precision: digest}


def test_an_adapter_is_scaled_after_it_is_rounded() -> None:
    tensors = {"layers.0.q.lora_A.weight": weight(0), "layers.0.q.lora_B.weight": weight(1)}
    held = dict(scaled_adapter(tensors, 1.5, torch.bfloat16))
    assert torch.equal(held["layers.0.q.lora_A.weight"], weight(0).to(torch.bfloat16))
    assert torch.equal(held["layers.0.q.lora_B.weight"], weight(1).to(torch.bfloat16) * 1.5)


@pytest.mark.parametrize(
    ("name", "of_text"),
    [
        ("model.merger.mlp.0.linear_1.weight", False),
        ("vpm.encoder.layers.0.mlp.fc1.weight", False),
        ("model.vqmodel.encoder.conv_in.weight", False),
        ("model.generation_embeddings.weight", False),
        ("model.generation_head.vision_head.weight", False),
        ("model.high_res_vision_neck.conv1.weight", False),
        ("model.high_res_vision_alpha", False),
        ("qformer.encoder.layer.0.output.dense.weight", False),
        ("query_tokens", False),
        ("language_projection.bias", False),
        ("model.visual.merger.norm.weight", False),
        ("model.language_model.layers.0.mlp.gate_proj.weight", True),
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("lm_head.weight", True),
        ("text_decoder.cls.predictions.bias", True),
    ],
)
def test_parts_of_towers_are_not_of_text(name: str, of_text: bool) -> None:
    assert is_of_text(name) is of_text
