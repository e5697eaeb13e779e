"""Experts behind an exchange compute what they compute without one, in a group of one rank; `test_experts.py` has several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from counterpoint.trainer.lora.experts import MultiLoraExperts
from counterpoint.trainer.model.adapters.adapted_layer import AdapterSpans
from counterpoint.trainer.model.exchange import Exchange, ExpertGroup
from counterpoint.trainer.model.load import load_model
from tests.trainer.conftest import EXPERTS, TOP_K

pytestmark = pytest.mark.slow

SPANS = [(1, 4), (0, 3), (2, 2)]
"""Slots and tokens; slot 2 has no adapter."""

TOKENS = sum(tokens for _, tokens in SPANS)


@pytest.fixture(scope="module")
def group() -> Iterator[ExpertGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    alone = dist.new_group([0])
    mesh = DeviceMesh.from_group(
        [alone, alone], "cpu", mesh=torch.zeros(1, 1, dtype=torch.int), mesh_dim_names=("a", "b")
    )
    yield ExpertGroup(alone, alone, 0, 1, 1, mesh)
    dist.destroy_process_group()


@pytest.fixture
def experts(moe_directory: Path) -> MultiLoraExperts:
    """With adapters in two slots of three, which change results."""
    model = load_model(moe_directory, "float32", torch.device("cpu"))
    layer = MultiLoraExperts(model.get_submodule("model.layers.0.mlp.experts"), rank=16, n_adapters=3)
    generator = torch.Generator().manual_seed(1)
    for slot, rank in ((0, 2), (1, 4)):
        layer.admit(slot, rank, 8.0, generator)
        for parameter in layer.adapter_parameters(slot).values():
            parameter.data.normal_(generator=generator)
    return layer


def compute(experts: MultiLoraExperts) -> list[Tensor]:
    """The result for random tokens, and gradients by them, by the gate's weights and by the adapters; expert 5 gets none."""
    generator = torch.Generator().manual_seed(2)
    hidden_TH = torch.randn(TOKENS, 32, generator=generator, requires_grad=True)
    weight_TK = torch.rand(TOKENS, TOP_K, generator=generator, requires_grad=True)
    expert_TK = torch.stack([torch.randperm(5, generator=generator)[:TOP_K] for _ in range(TOKENS)])
    result_TH = experts(hidden_TH, expert_TK, weight_TK)
    by = [hidden_TH, weight_TK, *(each for slot in (0, 1) for each in experts.adapter_parameters(slot).values())]
    for each in by:
        each.grad = None
    result_TH.square().sum().backward()
    return [result_TH, *(torch.zeros(()) if each.grad is None else each.grad.clone() for each in by)]


@pytest.mark.parametrize("spans", [SPANS, [(0, TOKENS)], [(2, TOKENS)], None])
def test_experts_behind_an_exchange_compute_the_same(
    experts: MultiLoraExperts, group: ExpertGroup, spans: list[tuple[int, int]] | None
) -> None:
    experts.spans = AdapterSpans.of(spans, torch.device("cpu")) if spans else None
    expected = compute(experts)
    exchange: Any = Exchange(group, EXPERTS)
    experts.base.exchange = exchange
    for found, wanted in zip(compute(experts), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_layer_that_is_computed_again_keeps_its_route(experts: MultiLoraExperts, group: ExpertGroup) -> None:
    exchange: Any = Exchange(group, EXPERTS)
    experts.base.exchange = exchange
    first = compute(experts)
    route, calls = exchange.route, len(exchange.made)
    exchange.kept = route
    again = compute(experts)
    assert exchange.route is route
    assert len(exchange.made) - calls == calls - 1, "nothing is announced again"
    assert torch.equal(first[0], again[0])
