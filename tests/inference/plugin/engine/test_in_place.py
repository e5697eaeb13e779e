"""Weights that are loaded in place are, bit for bit, those of vLLM's layerwise reload; other models are left to that."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.slow  # vLLM takes seconds to import


@pytest.fixture(scope="module", autouse=True)
def _vllm_of_one_rank() -> Iterator[None]:
    """Imports vLLM as its server does, without functions that torch compiles; its layers find that they are not divided.

    They are gone at the end: a kernel collected while torch traces a later test's function fails, and leaves gradients off.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        from vllm.distributed import parallel_state

        import counterpoint.inference.plugin.engine.in_place  # noqa: F401

        patch.setattr(parallel_state, "_TP", SimpleNamespace(rank_in_group=0, world_size=1))
        yield
    gc.collect()


class Small(nn.Module):
    """A norm, a linear layer with a bias and one without, loaded and packed for the kernel of this machine as at a start."""

    def __init__(self, dtype: torch.dtype) -> None:
        from vllm.model_executor.layers.linear import ReplicatedLinear
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        super().__init__()
        self.norm = nn.LayerNorm(32, dtype=dtype)
        self.up = ReplicatedLinear(32, 64, params_dtype=dtype, disable_tp=True)
        self.down = ReplicatedLinear(64, 32, bias=False, params_dtype=dtype, disable_tp=True)
        record_metadata_for_reloading(self)
        self.load_weights(checkpoint(0, dtype))
        for layer in (self.up, self.down):
            layer.quant_method.process_weights_after_loading(layer)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        own = dict(self.named_parameters())
        for name, tensor in weights:
            getattr(own[name], "weight_loader", default_weight_loader)(own[name], tensor)

    @torch.inference_mode()
    def computes(self) -> list[Tensor]:
        """What the layers hold, read through their kernels."""
        through = [
            layer.cpu_linear(torch.eye(inputs).to(layer.weight), layer.weight, None) for layer, inputs in self._linear()
        ]
        return [*through, self.up.bias.clone(), self.norm.weight.clone(), self.norm.bias.clone()]

    def _linear(self) -> list[tuple[Any, int]]:
        return [(self.up, 32), (self.down, 64)]


class WithVocabulary(nn.Module):
    """An embedding and an output layer that shares its weights, or none."""

    def __init__(self, has_head: bool) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        super().__init__()
        self.embedding = VocabParallelEmbedding(128, 32, params_dtype=torch.float32)
        self.head = None
        if has_head:
            self.head = ParallelLMHead(128, 32, params_dtype=torch.float32).tie_weights(self.embedding)
        record_metadata_for_reloading(self)
        self.load_weights([("embedding.weight", torch.ones(128, 32))])
        for layer in self.children():
            layer.quant_method.process_weights_after_loading(layer)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        ((_, tensor),) = weights
        self.embedding.weight_loader(self.embedding.weight, tensor)


def checkpoint(seed: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model, in an order that is not that of its layers."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "up.bias": (64,),
        "norm.bias": (32,),
        "down.weight": (32, 64),
        "norm.weight": (32,),
        "up.weight": (64, 32),
    }
    for name, shape in shapes.items():
        yield name, torch.randn(shape, generator=generator).to(dtype)


def reload_by_layers(model: Small, weights: Iterable[tuple[str, Tensor]]) -> None:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(model)
    model.load_weights(weights)
    finalize_layerwise_reload(model, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_computed_with_is_what_the_layerwise_reload_gives(dtype: torch.dtype) -> None:
    from counterpoint.inference.plugin.engine.in_place import load_in_place, loads_in_place

    ours, theirs = Small(dtype), Small(dtype)
    before = ours.computes()
    for seed in (1, 2):
        load_in_place(ours, checkpoint(seed, dtype))
        reload_by_layers(theirs, checkpoint(seed, dtype))
        assert [*map(torch.equal, ours.computes(), theirs.computes())] == [True] * 5
        assert [*map(torch.equal, ours.computes(), before)] == [False] * 5
    # The kernel alone holds the matrix, unless the processor has none, as some have none for bfloat16.
    assert ours.up.weight.numel() == theirs.up.weight.numel()
    assert dtype is torch.bfloat16 or not ours.up.weight.numel()
    assert loads_in_place(ours)


def test_a_model_with_a_layer_that_computes_with_other_numbers_is_left_to_the_reload() -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from counterpoint.inference.plugin.engine.in_place import loads_in_place

    class Derived(UnquantizedLinearMethod):
        pass

    model = Small(torch.float32)
    assert loads_in_place(model)
    model.down.quant_method = Derived()
    assert not loads_in_place(model)

    reshaped = Small(torch.float32)
    reshaped.norm.weight = nn.Parameter(torch.zeros(2, 16), requires_grad=False)
    assert not loads_in_place(reshaped)

    without = Small(torch.float32)
    del without.norm.weight
    assert not loads_in_place(without)


def test_an_embedding_beside_an_output_layer_is_packed_no_more_and_the_proof_is_the_same() -> None:
    from counterpoint.inference.digest import add_up
    from counterpoint.inference.plugin.cpu.embeddings import keep_embeddings_once
    from counterpoint.inference.plugin.engine.in_place import load_in_place
    from counterpoint.inference.plugin.worker_digest import held_weights

    def proof(model: nn.Module) -> dict[str, str]:
        return add_up((name, int(value)) for name, value in held_weights(model, torch.float32))

    packed, once = WithVocabulary(True), WithVocabulary(True)
    keep_embeddings_once(once)
    new = torch.randn(128, 32, generator=torch.Generator().manual_seed(0))
    for model in (packed, once):
        load_in_place(model, [("embedding.weight", new)])
    assert packed.embedding.cpu_linear is not nn.functional.linear
    assert once.embedding.cpu_linear is nn.functional.linear, "nor by a load"
    assert once.head is not None
    assert torch.equal(once.head.cpu_linear(torch.eye(32), once.head.weight, None), new.T)
    assert proof(packed) == proof(once)
    once.embedding.weight.data[3, 5] += 1  # what the head's kernel holds is as it was
    assert proof(packed) != proof(once)

    alone = WithVocabulary(False)
    keep_embeddings_once(alone)
    assert alone.embedding.cpu_linear is not nn.functional.linear, "it may be the output layer"


def test_a_small_matrix_stays_as_it_is_and_is_loaded_and_proven_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers import utils

    from counterpoint.inference.plugin.cpu import small_matrices
    from counterpoint.inference.plugin.engine.in_place import load_in_place, loads_in_place
    from counterpoint.inference.plugin.worker_digest import held_weights

    packed = Small(torch.float32)
    load_in_place(packed, checkpoint(1, torch.float32))
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)  # puts it back
    small_matrices.leave_small_matrices()
    plain, half = Small(torch.float32), Small(torch.bfloat16)
    assert loads_in_place(plain)
    load_in_place(plain, checkpoint(1, torch.float32))
    assert [layer.cpu_linear is nn.functional.linear for layer in (plain.up, half.up, packed.up)] == [
        True,
        False,
        False,
    ]
    assert [*map(torch.equal, plain.computes(), packed.computes())] == [True] * 5
    assert dict(held_weights(plain, torch.float32)) == dict(held_weights(packed, torch.float32))
    monkeypatch.setattr(small_matrices, "LARGEST", 32 * 64 - 1)
    assert Small(torch.float32).up.cpu_linear is not nn.functional.linear
